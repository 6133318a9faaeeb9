"""Fast PDDP: tiles of equal size, cut along principal directions, whatever stands around them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Shape
from gossamer.group import pddp as module
from gossamer.group.pddp import pddp


def stretched(num_tokens: int, dim: int, *, heads: int = 1, seed: int = 0) -> torch.Tensor:
    """Tokens whose principal directions are far apart, so that power iteration finds them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, num_tokens, dim, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64)).Q
    return (x * 3.0 ** -torch.arange(dim)) @ turn


def bisect(x: torch.Tensor, tokens: list[int], tile: int) -> list[set[int]]:
    """The definition: split on the principal direction (SVD) behind ceil(m / 2) tiles."""
    num_tiles = -(-len(tokens) // tile)
    if num_tiles == 1:
        return [set(tokens)]
    part = x[tokens] - x[tokens].mean(0)
    direction = torch.linalg.svd(part, full_matrices=False).Vh[0]
    by = (part @ direction).argsort().tolist()
    cut = tile * -(-num_tiles // 2)
    halves = [[tokens[i] for i in side] for side in (by[:cut], by[cut:])]
    return bisect(x, halves[0], tile) + bisect(x, halves[1], tile)


def leaves(order: torch.Tensor, tile: int) -> list[set[int]]:
    return [set(part.tolist()) for part in order.split(tile)]


@pytest.mark.parametrize(("num_tokens", "tile"), [(64, 32), (256, 32), (300, 64)])
def test_tiles_are_those_of_the_definition(num_tokens: int, tile: int) -> None:
    """With whole tiles and two halves of equal size the sign of a direction does not matter."""
    x = stretched(num_tokens // tile * tile, 6)[0, 0]
    got = leaves(pddp(x[None, None], tile=tile, iterations=60)[0, 0], tile)
    want = bisect(x, list(range(len(x))), tile)
    assert sorted(map(sorted, got)) == sorted(map(sorted, want))


@pytest.mark.parametrize("num_tokens", [97, 160, 321, 333])
def test_uneven_halves_are_cut_at_a_multiple_of_the_tile(num_tokens: int) -> None:
    """Either end of a direction may be the left one: one of the two is the definition's."""
    tile, x = 32, stretched(num_tokens, 6)[0, 0]
    order = pddp(x[None, None], tile=tile, iterations=60)[0, 0]
    num_tiles = -(-num_tokens // tile)
    cut = tile * -(-num_tiles // 2)
    part = x - x.mean(0)
    along = part @ torch.linalg.svd(part, full_matrices=False).Vh[0]
    sides = [set(along.argsort(descending=down)[:cut].tolist()) for down in (False, True)]
    assert set(order[:cut].tolist()) in sides


@given(st.integers(1, 700), st.sampled_from([1, 7, 32, 128]), st.integers(0, 99))
def test_every_tile_but_the_last_is_full(num_tokens: int, tile: int, seed: int) -> None:
    x = torch.randn(2, 2, num_tokens, 5, generator=torch.Generator().manual_seed(seed))
    order = pddp(x, tile=tile)
    assert order.shape == (2, 2, num_tokens)
    assert torch.equal(order.sort(-1).values, torch.arange(num_tokens).expand_as(order))
    sizes = [len(leaf) for leaf in leaves(order[0, 0], tile)]
    assert len(sizes) == -(-num_tokens // tile)
    assert sizes[:-1] == [tile] * (len(sizes) - 1)
    back = torch.empty_like(x).scatter_(2, order[..., None].expand_as(x), gathered(x, order))
    assert torch.equal(back, x)


def gathered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1]))


def test_tiles_are_tighter_than_runs_of_tokens() -> None:
    g = torch.Generator().manual_seed(3)
    centre = 4 * torch.randn(8, 16, generator=g)
    x = centre[torch.randint(8, (1000,), generator=g)] + torch.randn(1000, 16, generator=g)

    def scatter(y: torch.Tensor) -> float:
        parts = y.split(64)
        return sum((part - part.mean(0)).square().sum().item() for part in parts)

    assert scatter(x[pddp(x[None, None], tile=64)[0, 0]]) < 0.4 * scatter(x)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3e4])
def test_equal_tokens_keep_their_order(value: float) -> None:
    x = torch.full((1, 2, 777, 24), value)
    assert torch.equal(pddp(x), torch.arange(777).expand(1, 2, -1))


def test_two_kinds_of_tokens_part_and_keep_their_order() -> None:
    kind = torch.arange(512) % 2
    x = torch.stack([torch.full((8,), 0.3), torch.full((8,), -1.7)])[kind]
    halves = pddp(x[None, None], tile=64)[0, 0].split(256)
    assert all(torch.equal(half, half.sort().values) for half in halves)
    assert {int(kind[half].unique()) for half in halves} == {0, 1}


@given(st.integers(1, 400), st.integers(1, 300), st.integers(0, 50), st.booleans())
def test_padding_decides_nothing(num_tokens: int, pad: int, seed: int, mixed: bool) -> None:
    """Valid tokens fall into the tiles they would form alone; padding stands behind them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 1, num_tokens + pad, 6, generator=g)
    valid = torch.arange(num_tokens + pad) < num_tokens
    if mixed:
        valid = valid[torch.randperm(len(valid), generator=g)]
    x[:, :, ~valid] = torch.nan
    order = pddp(x, tile=32, valid=valid.expand(2, -1))
    alone = pddp(x[:, :, valid], tile=32)
    assert torch.equal(order[..., :num_tokens], valid.nonzero()[:, 0][alone])
    assert torch.equal(order[..., num_tokens:], (~valid).nonzero()[:, 0].expand(2, 1, -1))


def test_rows_may_have_different_lengths() -> None:
    x = Shape(4, 1, 1, 300, 300, 8, 1).tensors()[0]
    lengths = [300, 129, 1, 0]
    valid = torch.arange(300) < torch.tensor(lengths)[:, None]
    order = pddp(x, tile=32, valid=valid)
    for b, length in enumerate(lengths):
        alone = pddp(x[b : b + 1, :, :length], tile=32) if length else order[b : b + 1, :, :0]
        assert torch.equal(order[b : b + 1, :, :length], alone)


def test_heads_are_independent_of_one_another_and_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = Shape(2, 3, 1, 500, 500, 16, 1).tensors()[0]
    whole = pddp(x)
    assert torch.equal(pddp(x[1:, 2:]), whole[1:, 2:])
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    assert torch.equal(pddp(x), whole)


def test_no_global_random_numbers_and_any_dtype_or_strides() -> None:
    x = Shape(1, 2, 1, 500, 500, 16, 1).tensors(torch.bfloat16)[0]
    before = torch.random.get_rng_state()
    order = pddp(x)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(pddp(x.float()), order)
    assert torch.equal(pddp(x.transpose(1, 2).contiguous().transpose(1, 2)), order)


def test_a_common_offset_decides_nothing() -> None:
    """Keys and queries of trained models stand far from 0 in some channels."""
    x = torch.randint(-64, 64, (1, 1, 500, 8), generator=torch.Generator().manual_seed(2)).float()
    got, want = pddp(x + 4096.0, tile=64), pddp(x, tile=64)
    same = [a == b for a, b in zip(leaves(got[0, 0], 64), leaves(want[0, 0], 64), strict=True)]
    assert all(same)
