"""The kernels: they run any plan, or say why they cannot."""

from gossamer.kernels.base import (
    AttentionOutput,
    BackwardInput,
    DifferentiableKernel,
    Kernel,
    wants_gradients,
)
from gossamer.kernels.choose import choose_kernel, explain_kernels, list_kernels
from gossamer.kernels.dense import DENSE_KERNEL, dense_attention
from gossamer.kernels.reference import ReferenceKernel

__all__ = [
    "DENSE_KERNEL",
    "AttentionOutput",
    "BackwardInput",
    "DifferentiableKernel",
    "Kernel",
    "ReferenceKernel",
    "choose_kernel",
    "dense_attention",
    "explain_kernels",
    "list_kernels",
    "wants_gradients",
]
