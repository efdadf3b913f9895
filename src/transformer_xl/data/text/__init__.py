"""Text <-> tokens. Knows no corpus, no store and no lanes."""
