"""The all-reduces, each a backend with the same three methods, and their start and wait in training."""
