"""Connections, and bytes in and out of them. Knows no model, and nothing of what can be asked."""
