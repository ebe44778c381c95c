"""Accuracy: what is asked, what was found. Imports leaves, convert and the runtime."""
