"""Retraining of a whole checkpoint, full or by adapters, in one process or on many."""
