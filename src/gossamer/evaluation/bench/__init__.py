"""Benchmarks on a GPU: correctness first, then times beside the fastest dense attention."""
