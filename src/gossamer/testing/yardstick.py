"""Yardsticks: dense attention in float64 by the textbook, and tolerances derived from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.kernels import AttentionOutput


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None = None,
    *,
    scale: float | None = None,
) -> AttentionOutput:
    """Attend in float64, by the textbook.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        weights: [B|1, H|1, N, S] weight of each pair (a mask is weights of 0 and 1); None: all 1.
        scale: Factor on the logits; None for 1/sqrt(D).

    Returns:
        The output in float64, 0 for queries without any key, and the log-sum-exp.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    logits = q.double() @ k.mT * factor
    if weights is not None:
        logits = logits + weights.double().log()
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return AttentionOutput(p @ v, lse)


@dataclass(frozen=True)
class Tolerance:
    """How far a result may stand from float64: twice what dense attention in the dtype does.

    Attributes:
        out: Bound on the largest difference of the output.
        lse: Bound on the largest difference of the log-sum-exp.
    """

    out: float
    lse: float


def tolerance(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tolerance:
    """Derive the tolerance from the same-precision dense error and the dtype's rounding band.

    The band covers rows of few keys, where dense attention averages rounding away: one rounding of
    the largest value for the output, and of the largest logit (float32) for the log-sum-exp.

    Args:
        q: [B, H, N, D] queries on the CPU.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        scale: Factor on the logits; None for 1/sqrt(D).
    """
    group = q.shape[1] // k.shape[1]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = [], []
    # Sparse rows hold few keys, where nothing averages out: dense attention over few keys is asked.
    for length in {1, 2, 8, 32, 128, k.shape[2]}:
        few = [x[:, :, :length] for x in (k, v)]
        exact = attention(q, *few, scale=scale)
        got = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, *(x.repeat_interleave(group, dim=1) for x in few), 0.0, False, scale=scale
        )
        largest = exact.lse.abs().max().clamp(min=1)
        inner = torch.finfo(work).eps * largest * v.abs().max().double()
        out += [(got[0].double() - exact.out).abs().max() + inner]
        lse += [
            (got[1].double() - exact.lse).abs().max() + torch.finfo(torch.float32).eps * largest
        ]
    band = torch.finfo(q.dtype).eps * v.abs().max().double()
    return Tolerance(out=2 * float(max(out) + band), lse=2 * float(max(lse)))


def assert_matches(got: AttentionOutput, want: AttentionOutput, allowed: Tolerance) -> None:
    """Compare output and log-sum-exp; both numbers are in the message.

    Raises:
        AssertionError: They differ by more than allowed.
    """
    require(got.out.shape == want.out.shape, f"shape {got.out.shape} is not {want.out.shape}")
    require(got.lse.shape == want.lse.shape, f"shape {got.lse.shape} is not {want.lse.shape}")
    out = (got.out.double() - want.out.double()).abs().max().item()
    require(out <= allowed.out, f"output differs by {out:.3g}, allowed {allowed.out:.3g}")
    empty = want.lse == -torch.inf
    require(torch.equal(empty, got.lse == -torch.inf), "other queries read no key")
    if not bool(empty.all()):
        lse = (got.lse.double() - want.lse.double())[~empty].abs().max().item()
        require(lse <= allowed.lse, f"log-sum-exp differs by {lse:.3g}, allowed {allowed.lse:.3g}")


def require(holds: bool, message: str) -> None:
    """Fail a check.

    Raises:
        AssertionError: It does not hold.
    """
    if not holds:
        raise AssertionError(message)
