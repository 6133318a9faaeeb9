"""Dense attention without a plan: what a session runs where it does not sparsify."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

DENSE_KERNEL = "sdpa"


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_valid: Tensor | None = None,
) -> Tensor:
    """Attend to every visible key through torch's scaled_dot_product_attention.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        scale: Factor on the logits; None for 1/sqrt(D).
        causal: Query i sees key j iff j <= i + S - N.
        key_valid: [B|1, S] bool, False for padded keys.

    Returns:
        [B, H, N, D]; 0 for queries that see no key. Padded keys and values are never read, whatever
        they hold.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if key_valid is None and (not causal or num_queries == num_keys):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    mask = torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=q.device)
    if key_valid is not None:
        mask = key_valid[:, None, None]
        padding = ~key_valid[:, None, :, None]
        k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    if causal:
        position = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
        mask = mask & (torch.arange(num_keys, device=q.device) <= position)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    # Back ends differ on rows without any key.
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
