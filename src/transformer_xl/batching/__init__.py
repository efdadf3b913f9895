"""Texts of many requests side by side through one engine. Knows no HTTP."""
