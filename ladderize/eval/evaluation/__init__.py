"""The run of ``ladderize eval``, from its tasks to its tables."""
