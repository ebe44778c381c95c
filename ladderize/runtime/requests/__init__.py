"""Scoring and continuing of requests of different lengths, for ``eval --backend runtime``."""
