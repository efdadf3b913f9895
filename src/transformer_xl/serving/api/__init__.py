"""What can be asked of a server, and its answers."""
