"""This process's place among its ranks: launchers' variables, cores and threads, groups. A leaf."""
