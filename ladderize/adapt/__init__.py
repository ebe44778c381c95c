"""Winning the lost accuracy back. Imports leaves, convert, results of eval, and of the runtime the engine only."""
