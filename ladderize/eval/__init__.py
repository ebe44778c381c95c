"""Accuracy of models: evaluation and comparison. Imports leaves, convert and the runtime."""
