"""A store's tokens as a model is fed them: segments of lanes. Knows no corpus."""
