"""Retraining and repair of converted models. Imports leaves, convert, eval's results, and of the runtime the engine
only."""
