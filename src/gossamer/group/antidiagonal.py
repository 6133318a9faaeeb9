"""Estimating block masses from anti-diagonals of strided groups (XAttention)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.group.pool import block_means

_CHUNK_BYTES = 64 << 20  # of the float32 logits between groups held at once


@dataclass(frozen=True, kw_only=True)
class Strides:
    """How tokens are grouped, and the pairs of groups summed.

    Attributes:
        stride: Consecutive tokens per group.
        tile: Queries per tile, a multiple of `stride`.
        block: Keys per block, a multiple of `stride`.
        scale: Factor on the logits.
        causal: Whether query i sees keys up to i + S - N only.
    """

    stride: int
    tile: int
    block: int
    scale: float
    causal: bool


class _Groups:
    """Tokens cut into groups of `stride`; a token that is missing stands for its group's mean."""

    def __init__(self, x: Tensor, stride: int, valid: Tensor | None) -> None:
        """Keep the tokens; x is [B, H, N, D] and valid [B, N] bool or None."""
        self.x, self.stride, self.valid = x, stride, valid
        self.number = -(-x.shape[2] // stride)
        self.means: Tensor | None = None
        if valid is not None or x.shape[2] % stride:
            self.means, _ = block_means(x, stride, valid=valid)  # [B, H, groups, D]

    def phase(self, at: int, begin: int, end: int) -> Tensor:
        """Return the tokens at place `at` of groups begin…end - 1, [B, H, groups, D] float32."""
        pick = slice(begin * self.stride + at, end * self.stride, self.stride)
        x = self.x[:, :, pick].float()
        if self.means is None:
            return x
        means = self.means[:, :, begin:end]
        if self.valid is not None:
            there = self.valid[:, None, pick, None]
            x = torch.where(there, x, means[:, :, : x.shape[2]])
        return torch.cat([x, means[:, :, x.shape[2] :]], dim=2)

    def rows(self, begin: int, end: int, *, backwards: bool) -> Tensor:
        """Return groups begin…end - 1 as rows of all their tokens, [B, H, groups, stride * D].

        In the tokens' dtype, which the means of missing ones are rounded to.
        """
        x = self.x[:, :, begin * self.stride : end * self.stride]
        if self.means is not None:
            missing = (end - begin) * self.stride - x.shape[2]
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
            place = torch.arange(begin * self.stride, end * self.stride, device=x.device)
            there = (place < self.x.shape[2])[None]
            if self.valid is not None:
                valid = torch.nn.functional.pad(self.valid, (0, missing))
                there = there & valid[:, begin * self.stride : end * self.stride]
            means = self.means[:, :, begin:end].to(x.dtype).repeat_interleave(self.stride, dim=2)
            x = torch.where(there[:, None, :, None], x, means)
        x = x.unflatten(2, (-1, self.stride))
        return (x.flip(3) if backwards else x).flatten(3)


def antidiagonal_mass(
    q: Tensor, k: Tensor, strides: Strides, *, valid_q: Tensor | None, valid_k: Tensor | None
) -> Tensor:
    """Estimate the attention mass between tiles of queries and blocks of keys.

    For a group a of consecutive queries and a group b of keys, the logit is the mean over the
    anti-diagonal of the stride x stride square of their pairs: query stride - 1 - i with key i.
    Softmax runs over the groups a query group sees, each weighted by its valid keys; masses are
    summed over the blocks' groups and averaged over the tiles' valid queries.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        strides: The grouping.
        valid_q: [B, N] bool, queries that count; None for all.
        valid_k: [B, S] bool, keys that count; None for all.

    Returns:
        [B, H, R, C] float32; a row sums to 1 where every query group of the tile sees a key.
    """
    stride, num_queries, num_keys = strides.stride, q.shape[2], k.shape[2]
    shift = num_keys - num_queries
    queries, keys = _Groups(q, stride, valid_q), _Groups(k, stride, valid_k)
    group_weight = _sizes(valid_q, num_queries, stride, q.device).float()  # [B|1, groups]
    key_size = _sizes(valid_k, num_keys, stride, q.device)  # [B|1, groups]
    log_size = key_size.float().log()[:, None, None]  # -inf: a group without keys has no mass
    # A group of queries sees a group of keys if its last query sees the first valid key.
    first_key = torch.arange(0, num_keys, stride, device=q.device)[None]
    if valid_k is not None:
        flags = torch.nn.functional.pad(valid_k.byte(), (0, -num_keys % stride))
        first_key = first_key + flags.unflatten(1, (-1, stride)).argmax(-1)
    group_end = (torch.arange(queries.number, device=q.device) + 1) * stride - 1
    last_seen = group_end.clamp(max=num_queries - 1) + shift
    by_tile, by_block = strides.tile // stride, strides.block // stride
    step = _CHUNK_BYTES // (4 * q.shape[0] * q.shape[1] * keys.number)
    step = max(1, step // by_tile) * by_tile
    parts = []
    for begin in range(0, queries.number, step):
        end = min(begin + step, queries.number)
        logits = _logits(queries, keys, begin, end).mul_(strides.scale / stride)
        if valid_k is not None or num_keys % stride:
            logits = logits + log_size
        if strides.causal:
            future = first_key[:, None] > last_seen[begin:end, None]  # [B|1, n, groups]
            logits = logits.masked_fill_(future[:, None], -torch.inf)
        mass = torch.softmax(logits, dim=-1).nan_to_num_(0.0)  # NaN: a group that sees nothing
        mass = _sum_pieces(mass, by_block, dim=3)  # [B, H, n, C]
        weight = group_weight[:, None, begin:end, None]
        total = _sum_pieces(weight, by_tile, dim=2).clamp(min=1)
        parts.append(_sum_pieces(mass * weight, by_tile, dim=2) / total)
    return torch.cat(parts, dim=2)


def _logits(queries: _Groups, keys: _Groups, begin: int, end: int) -> Tensor:
    """Return the sums over anti-diagonals [B, H, end - begin, groups], without scale."""
    batch, heads = queries.x.shape[:2]
    kv_heads = keys.x.shape[1]
    rows = heads // kv_heads * (end - begin)
    if _sums_halves_in_float32(queries.x):
        # One product over all places, on the tensor cores.
        x = queries.rows(begin, end, backwards=True).reshape(batch * kv_heads, rows, -1)
        y = keys.rows(0, keys.number, backwards=False).flatten(0, 1)
        product = torch.bmm(x, y.mT, out_dtype=torch.float32)
        return product.view(batch, heads, end - begin, keys.number)
    logits = queries.x.new_zeros(batch * kv_heads, rows, keys.number, dtype=torch.float32)
    for at in range(queries.stride):
        x = queries.phase(queries.stride - 1 - at, begin, end)  # [B, H, n, D]
        x = x.reshape(batch * kv_heads, rows, -1)
        logits.baddbmm_(x, keys.phase(at, 0, keys.number).flatten(0, 1).mT)
    return logits.view(batch, heads, end - begin, keys.number)


def _sums_halves_in_float32(x: Tensor) -> bool:
    """Return whether torch multiplies matrices of this dtype here and gives float32."""
    halves = x.dtype in (torch.bfloat16, torch.float16)
    return halves and x.device.type == "cuda" and torch.version.cuda is not None


def _sizes(valid: Tensor | None, length: int, size: int, device: torch.device) -> Tensor:
    """Return how many tokens count in each piece of `size`, [B|1, ceil(length / size)] int64."""
    if valid is None:
        valid = torch.ones(1, length, dtype=torch.bool, device=device)
    padded = torch.nn.functional.pad(valid, (0, -length % size))
    return padded.unflatten(1, (-1, size)).sum(2)


def _sum_pieces(x: Tensor, size: int, *, dim: int) -> Tensor:
    """Sum pieces of `size` along `dim` of x [B, H, n, m]; the last piece may be ragged."""
    missing = -x.shape[dim] % size
    x = torch.nn.functional.pad(x, (0, missing) if dim == 3 else (0, 0, 0, missing))
    return x.unflatten(dim, (-1, size)).sum(dim + 1)
