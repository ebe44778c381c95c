"""``ladderize bench``: one harness of timing, and what a sample of inference is."""
