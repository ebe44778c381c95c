"""The command ``ladderize bench --train``: the timing of training steps."""
