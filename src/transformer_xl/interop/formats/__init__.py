"""What the layouts of other people mean: their settings, names and conventions <-> ours. Knows no files."""
