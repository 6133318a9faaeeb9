"""Grouping on a GPU: our Triton kernels, imported by the functions in `group/` that use them."""
