"""The page about a sweep: joined results, plots, tables and the answer."""
