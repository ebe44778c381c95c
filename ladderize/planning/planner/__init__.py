"""From times and accuracy costs of sync points to the layout to choose."""
