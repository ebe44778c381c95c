"""The command ``ladderize bench``: one harness for timing, and the timing of inference."""
