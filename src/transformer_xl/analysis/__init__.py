"""What a trained model looks at, and how far back it matters."""
