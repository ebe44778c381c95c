"""The operations between two products: for CPUs in C++, for GPUs in Triton."""
