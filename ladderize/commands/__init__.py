"""A file for each command: parse, call, print. Heavy imports are inside of functions; only cli and what runs
commands (sweep, demo) import from here."""
