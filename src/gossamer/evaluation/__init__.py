"""How good and how fast sparse generation is: metrics, videos, and the comparison harness."""
