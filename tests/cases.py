"""Random attention calls and random plans over them, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from gossamer import KeyBlocks, KeyTokens, SparsePlan
from gossamer.testing import Shape

__all__ = ["Options", "Shape", "options", "random_plan", "shapes"]


@st.composite
def shapes(draw: st.DrawFn, *, self_attention: bool = False, max_tokens: int = 300) -> Shape:
    """Draw sizes: ragged lengths, any head dim, grouped heads, batches."""
    num_keys = draw(st.integers(1, max_tokens))
    return Shape(
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 1, 2, 3])),
        num_queries=num_keys if self_attention else draw(st.integers(1, max_tokens)),
        num_keys=num_keys,
        dim=draw(st.sampled_from([8, 20, 32, 64])),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class Options:
    """What a random plan has."""

    blocks: bool
    causal: bool
    padded: bool
    weighted: bool
    virtual: int
    window: tuple[int, int, int] | None
    permuted: bool
    shared_heads: bool
    tile: int
    density: float


@st.composite
def options(draw: st.DrawFn) -> Options:
    """Draw what a plan has; virtual keys have no causal form."""
    blocks = draw(st.booleans())
    virtual = 0 if blocks else draw(st.sampled_from([0, 0, 1, 5]))
    side = st.integers(0, 60) | st.just(-1)
    window = draw(st.none() | st.tuples(side, side, st.integers(0, 9)))
    return Options(
        blocks=blocks,
        causal=False if virtual else draw(st.booleans()),
        padded=draw(st.booleans()),
        weighted=not blocks and draw(st.booleans()),
        virtual=virtual,
        window=window,
        permuted=draw(st.booleans()),
        shared_heads=draw(st.booleans()),
        tile=draw(st.sampled_from([1, 16, 64, 128])),
        density=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
    )


def random_plan(shape: Shape, opt: Options) -> SparsePlan:
    """Make a plan with these options; rows may be empty, tiles ragged and rows shared."""
    g = torch.Generator().manual_seed(shape.seed + 1)
    batch, heads = (1, 1) if opt.shared_heads else (shape.batch, shape.heads)
    key_valid = None
    if opt.padded:
        key_valid = torch.rand(shape.batch, shape.num_keys, generator=g) < 0.8
    num_tiles = -(-shape.num_queries // opt.tile)
    query_index = tile_row = None
    num_rows = num_tiles
    if opt.permuted:
        num_tiles += 2  # room for rows that hold no query
        noise = torch.rand(batch, heads, num_tiles * opt.tile, generator=g)
        place = noise.argsort(-1).argsort(-1)  # a random permutation
        query_index = torch.where(place < shape.num_queries, place, -1)
        query_index = query_index.view(batch, heads, num_tiles, opt.tile).int()
        num_rows = max(1, num_tiles // 2)
        tile_row = torch.randint(num_rows, (batch, heads, num_tiles), generator=g).int()
    make = _blocks if opt.blocks else _tokens
    return SparsePlan(
        num_queries=shape.num_queries,
        num_keys=shape.num_keys,
        tile=opt.tile,
        keys=make(shape, opt, (batch, heads, num_rows), g),
        query_index=query_index,
        tile_row=tile_row,
        causal=opt.causal,
        key_valid=key_valid,
        window=opt.window,
    )


def _blocks(
    shape: Shape, opt: Options, rows: tuple[int, int, int], g: torch.Generator
) -> KeyBlocks:
    block = 32
    key_order = None
    num_blocks = -(-shape.num_keys // block)
    if opt.permuted:
        num_blocks += 1  # holes
        noise = torch.rand(*rows[:2], num_blocks * block, generator=g)
        place = noise.argsort(-1).argsort(-1)
        key_order = torch.where(place < shape.num_keys, place, -1).int()
    mask = torch.rand(*rows, num_blocks, generator=g) < opt.density
    return KeyBlocks.from_mask(mask, block=block, key_order=key_order)


def _tokens(
    shape: Shape, opt: Options, rows: tuple[int, int, int], g: torch.Generator
) -> KeyTokens:
    total = shape.num_keys + opt.virtual
    mask = torch.rand(*rows, total, generator=g) < opt.density
    count = mask.sum(-1)
    index = torch.argsort((~mask).byte(), dim=-1, stable=True)
    log_weight = torch.randn(*rows, total, generator=g) if opt.weighted else None
    keys = KeyTokens.from_lists(index, count=count, log_weight=log_weight)
    if not opt.virtual:
        return keys
    extra = (shape.batch, shape.kv_heads, opt.virtual, shape.dim)
    return KeyTokens(
        start=keys.start,
        count=keys.count,
        index=keys.index,
        log_weight=keys.log_weight,
        extra_k=torch.randn(extra, generator=g),
        extra_v=torch.randn(extra, generator=g),
    )
