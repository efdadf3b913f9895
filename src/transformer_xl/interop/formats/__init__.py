"""What the layouts of other people mean: their settings, names and conventions <-> ours. Opens no file of a stranger."""
