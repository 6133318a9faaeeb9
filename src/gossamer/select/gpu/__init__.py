"""Selection on a GPU: our Triton kernels, imported by the functions in `select/` that use them."""
