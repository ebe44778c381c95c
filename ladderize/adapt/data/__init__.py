"""Training data on ``datasets``: from files and the hub to packed rows, and to batches of them."""
