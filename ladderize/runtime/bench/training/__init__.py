"""``ladderize bench --train``: what a sample of a training step is."""
