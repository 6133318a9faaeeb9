"""The flash kernel: an adapter to flash-attn-4, for Hopper and Blackwell GPUs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, BackwardInput, with_positive_scale
from gossamer.kernels.flash import blocks, paged
from gossamer.kernels.flash.call import TILE
from gossamer.plan import KeyBlocks, SparsePlan

# What the adapter rests on (`call.py`) is under no promise of stability, and a misunderstanding
# shows as a wrong output, not as an error. So a version runs once somebody has read it.
_VERSION = "4.0.0b36"
_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_DIM, _MOST_DIM = 64, 128
_DIM_STEP = 16  # flash-attn-4 refuses pages whose rows do not fill its tiles of 16
_HOPPER = (9, 0)
_BLACKWELL = 10


class FlashKernel:
    """Runs plans on flash-attn-4 with bfloat16 or float16 products and float32 scores and sums.

    Rows of tokens and of small blocks run as paged attention: a key row is a sequence, its list the
    page table. Rows of blocks of 128 run block-sparse on Hopper, and their output and log-sum-exp
    have gradients of q, k and v. The launch order is ignored.

    Unlike in other kernels, a query that reads a NaN key gets the log-sum-exp -inf (and the output
    NaN), and a NaN value on the diagonal of a causal plan reaches all queries of its tile.
    """

    name = "flash"

    def supports(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
    ) -> list[str]:
        """Return why the kernel cannot run: no package, another device, dtype or size, a mask."""
        del v
        reasons = unavailable(q.device)
        if q.dtype not in _DTYPES:
            reasons.append(f"dtype {q.dtype} is not one of {', '.join(map(str, _DTYPES))}")
        dim = q.shape[-1]
        if not _LEAST_DIM <= dim <= _MOST_DIM or dim % _DIM_STEP:
            reasons.append(
                f"head dim {dim} is not a multiple of {_DIM_STEP} from {_LEAST_DIM} to {_MOST_DIM}"
            )
        if plan.tile != TILE:
            reasons.append(f"tile {plan.tile} is not {TILE}")
        reasons += _mask_reasons(plan, q.device)
        if gradients:
            reasons += _gradient_reasons(plan, q.shape[1] // k.shape[1], q.device)
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan, block-sparse where its blocks are flash-attn-4's own, else paged.

        Waits for the device once where the length of the longest row decides over much memory.
        """
        group = q.shape[1] // k.shape[1]
        if _takes_blocks(q.device) and blocks.can_run(plan, group):
            return blocks.run(q, k, v, plan, scale)
        q, scale = with_positive_scale(q, scale)
        return paged.run(q, k, v, plan, scale)

    def backward(
        self, given: BackwardInput, plan: SparsePlan, scale: float, *, of_keys: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of a plan that runs block-sparse, from what the forward pass left.

        flash-attn-4 computes those of keys in any case.
        """
        d_q, d_k, d_v = blocks.differentiate(given, plan, scale)
        return (d_q, d_k, d_v) if of_keys else (d_q, None, None)


def unavailable(device: torch.device) -> list[str]:
    """Return why flash-attn-4 cannot run on a device, whatever is asked of it; none if it can."""
    return _missing() + _device_reasons(device)


def _missing() -> list[str]:
    """Return why flash-attn-4 cannot be called, without importing it."""
    found = _installed()
    if found is None:
        return ['needs the package flash-attn-4: pip install "gossamer[hopper]"']
    if found != _VERSION:
        return [f"is written for flash-attn-4 {_VERSION}, and {found} is installed"]
    return []


@functools.cache
def _installed() -> str | None:
    """Return the version of flash-attn-4; None where it is not there.

    The module's name alone says little: flash-attn 2 and 3 share the parent package.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_reasons(device: torch.device) -> list[str]:
    """Return why a device does not run the kernel."""
    wanted = "runs on CUDA GPUs of compute capability 9.0 or 10.x, "
    if device.type != "cuda" or torch.version.cuda is None:
        return [f"{wanted}these tensors are on {device}"]
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != _HOPPER and major != _BLACKWELL:
        return [f"{wanted}this one has {major}.{minor}"]
    return []


def _takes_blocks(device: torch.device) -> bool:
    """Return whether block sparsity in tiles of 128 queries runs on the device.

    On Blackwell flash-attn-4 pairs two query tiles, so a list would have to serve 256 queries.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def _mask_reasons(plan: SparsePlan, device: torch.device) -> list[str]:
    """Return which masks of the plan the kernel cannot express."""
    reasons: list[str] = []
    if plan.window is not None:
        reasons.append("a window is cut per query, which neither pages nor block lists express")
    if not plan.causal:
        return reasons
    if not isinstance(plan.keys, KeyBlocks) or plan.keys.block != TILE:
        reasons.append(f"causal rows are single tokens or blocks other than {TILE}")
    elif plan.query_index is not None or plan.keys.key_order is not None:
        reasons.append("causal plans of permuted queries or keys have lost their positions")
    elif plan.key_valid is not None:
        reasons.append("causal plans of padded keys are not expressed by block lists")
    elif not _takes_blocks(device):
        reasons.append("causal plans run on compute capability 9.0 alone")
    return reasons


def _gradient_reasons(plan: SparsePlan, group: int, device: torch.device) -> list[str]:
    """Return why the plan has no gradients here: those of pages do not exist in flash-attn-4."""
    reasons: list[str] = []
    if not blocks.can_run(plan, group):
        reasons.append(
            f"gradients are those of whole blocks of {TILE} keys, without padding and in an order "
            "that the heads of a KV head share"
        )
    if not _takes_blocks(device):
        reasons.append("gradients run on compute capability 9.0 alone")
    strict = torch.are_deterministic_algorithms_enabled()
    if strict and not torch.is_deterministic_algorithms_warn_only_enabled():
        reasons.append(
            "gradients of queries are summed in no fixed order, which "
            "torch.use_deterministic_algorithms forbids"
        )
    return reasons
