"""Launch orders on a GPU: our Triton kernels, imported by what uses them in `order/`."""
