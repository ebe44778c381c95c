"""The operations of a CPU between two products, in C++ that is compiled where it runs. May import: ranks."""
