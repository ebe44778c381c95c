"""The commands: parse, call, print.

Heavy imports are inside of functions. Only cli, sweep and demo, which run commands, import from here.
"""
