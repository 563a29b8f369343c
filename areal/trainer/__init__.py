"""Training loops: what one step is, in order."""
