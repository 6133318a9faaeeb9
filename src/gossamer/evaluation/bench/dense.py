"""Dense attention on this device: every one there is, and which of them is the fastest."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossamer.evaluation.bench.check import check_dense
from gossamer.evaluation.bench.timing import Timing, time_call
from gossamer.kernels.flash import unavailable

FLASH_4 = "flash-attn-4"
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-2": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTimes:
    """How long dense attention of one shape takes.

    Attributes:
        name: The fastest, e.g. "cudnn".
        timing: Its time, what sparse attention is measured against.
        each: Every dense attention that runs here with its time, the fastest too.
    """

    name: str
    timing: Timing
    each: tuple[tuple[str, Timing], ...]


def fastest_dense(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> DenseTimes:
    """Time every dense attention there is, each checked against float64 before.

    Args:
        q: [B, H, N, D] queries on a CUDA device.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        causal: Query i sees key j iff j <= i; needs N = S.

    Raises:
        ArithmeticError: One of them is wrong.
        RuntimeError: None of them runs on these tensors.
    """
    names = [*_BACKENDS, *([] if unavailable(q.device) else [FLASH_4])]
    found: list[tuple[str, Timing]] = []
    refused: list[str] = []
    for name in names:
        try:
            call, out = _first_that_runs(name, q, k, v, causal)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # how torch says that a back end does not take these
            refused.append(f"{name}: {error}")
            continue
        check_dense(name, out, q, k, v, causal=causal)
        found.append((name, time_call(call)))
    if not found:
        raise RuntimeError("no dense attention runs here: " + "; ".join(refused))
    name, timing = min(found, key=lambda entry: entry[1].median_ms)
    return DenseTimes(name=name, timing=timing, each=tuple(found))


def attend_densely(name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Attend by the dense attention of a name.

    Args:
        name: "cudnn", "flash-2" or "flash-attn-4".
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        causal: Query i sees key j iff j <= i; needs N = S.

    Returns:
        [B, H, N, D].

    Raises:
        RuntimeError: It does not take these tensors.
    """
    if name == FLASH_4:
        out = _flash_attention()(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        out = out[0] if isinstance(out, tuple) else out  # with the log-sum-exp behind it
        return out.transpose(1, 2)  # it takes and gives [B, N, H, D], strided
    gqa = q.shape[1] != k.shape[1]
    with sdpa_kernel(_BACKENDS[name]):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


def _first_that_runs(
    name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Callable[[], Tensor], Tensor]:
    """Return the call to time, on the KV heads as they are or repeated, and what it returned."""
    call = partial(attend_densely, name, q, k, v, causal=causal)
    group = q.shape[1] // k.shape[1]
    try:
        return call, call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if group == 1:
            raise
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    call = partial(attend_densely, name, q, k, v, causal=causal)
    return call, call()


def _flash_attention() -> Callable[..., Any]:
    """Return flash-attn-4's dense attention."""
    return importlib.import_module("flash_attn.cute.interface").flash_attn_func
