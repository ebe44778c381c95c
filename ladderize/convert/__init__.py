"""Checkpoint to checkpoint: plan, write, verify, rename. Imports leaves only."""
