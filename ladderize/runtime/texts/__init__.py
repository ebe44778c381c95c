"""``ladderize generate``: prompts and texts sampled from the model, kept as they come."""
