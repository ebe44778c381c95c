"""``ladderize calibrate``: timings of this machine, and the fit of the cost model to them."""
