"""How a store comes to be: which text, from where, verified, cut, counted and encoded. Knows nothing of how it is read again."""
