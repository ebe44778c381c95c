"""The operations between two products: for CPUs in C++ that is compiled where it runs, for GPUs in Triton.

May import: ranks.
"""
