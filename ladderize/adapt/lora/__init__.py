"""Adapters: their options, and reading, writing and checking them as PEFT has them."""
