"""Accuracy against speed. Imports everything; sweep runs commands."""
