"""The kernels: they run any plan, or say why they cannot."""

from gossamer.kernels.base import AttentionOutput, Kernel
from gossamer.kernels.choose import choose_kernel, explain_kernels, list_kernels
from gossamer.kernels.dense import DENSE_KERNEL, dense_attention

__all__ = [
    "DENSE_KERNEL",
    "AttentionOutput",
    "Kernel",
    "choose_kernel",
    "dense_attention",
    "explain_kernels",
    "list_kernels",
]
