"""``ladderize plan``: predicted rows, the layout to choose, and its verification by measurements."""
