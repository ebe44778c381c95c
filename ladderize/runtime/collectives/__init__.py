"""The backends of all-reduces, and the start and wait of sums in training."""
