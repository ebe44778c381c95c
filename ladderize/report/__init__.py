"""The page about a sweep: joined results, its plots, tables and answer."""
