"""How well models learn a text in equal time: ours, and those that learn beside it."""
