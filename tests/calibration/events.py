"""Attention events as a session shows them, and what the oracles of calibration share."""

from __future__ import annotations

import torch
from torch import Tensor

import gossamer as gs

GRID = (2, 4, 6)
TOKENS = 48


def tensors(seed: int = 0, heads: int = 2, kv_heads: int = 2, batch: int = 1, tokens: int = TOKENS):
    """Return q, k, v with enough contrast for sparse maps."""
    g = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(batch, heads, tokens, 8, generator=g)
    k, v = torch.randn(2, batch, kv_heads, tokens, 8, generator=g).unbind()
    return q, k, v


def show(observer, q: Tensor, k: Tensor, v: Tensor, **facts: object) -> None:
    """Run one dense call in a session that the observer watches."""
    call = {"num_layers": 1, "num_steps": 4, "grid": GRID} | facts
    session = gs.Session(gs.Recipe(method=gs.Dense()), observer=observer)
    session.attention(q, k, v, gs.Call(**call))


def attention_map(q: Tensor, k: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the probabilities [B, H, N, S] in float64."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q.double() @ k.mT * q.shape[-1] ** -0.5
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None], -torch.inf)
    return logits.softmax(-1)
