"""Conversion of a checkpoint: plan, write, verify, rename. Imports leaves only."""
