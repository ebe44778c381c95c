"""The ranks of a process: launchers' variables, cores and threads, groups. A leaf."""
