"""NSA: blocks selected by compressed keys per KV head, joined with window and first block."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.methods.nsa import NSA
from oracle import assert_matches, attention, tolerance


def importance(
    shape: Shape, method: NSA, seen: torch.Tensor, position: torch.Tensor | None
) -> torch.Tensor:
    """Return how important each block is to each query, [Hk, N, C] float64, in one batch row.

    Args:
        shape: The sizes; the tensors of batch row 0 are read.
        method: The method.
        seen: [S] bool, valid keys.
        position: [N] positions of causal queries; None without causality.
    """
    q, k, _ = shape.tensors()
    runs, begin = [], 0
    total = int(seen.nonzero()[-1]) + 1  # padding at the end is no part of the sequence
    while True:
        end = min(begin + method.length, total)
        members = [j for j in range(begin, end) if seen[j]]
        if members:
            runs.append((begin, end, k[0, :, members].double().mean(1)))
        if end == total:
            break
        begin += method.stride
    num_blocks = -(-shape.num_keys // method.block)
    result = torch.zeros(shape.kv_heads, shape.num_queries, num_blocks, dtype=torch.float64)
    for h, i in itertools.product(range(shape.heads), range(shape.num_queries)):
        past = [run for run in runs if position is None or run[1] - 1 <= position[i]]
        if not past:
            continue
        means = torch.stack([run[2][h // shape.group] for run in past])
        mass = (means @ q[0, h, i].double() * shape.dim**-0.5).softmax(0)
        for (start, _, _), p in zip(past, mass, strict=True):
            for place in range(start, start + method.length, method.stride):
                if place // method.block < num_blocks:
                    result[h // shape.group, i, place // method.block] += p
    return result


def brute_force(
    shape: Shape, method: NSA, valid: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks each query of batch row 0 reads [Hk, N, C], and where this is certain."""
    has_place = causal or shape.num_queries == shape.num_keys
    position = torch.arange(shape.num_queries) + (
        shape.num_keys - shape.num_queries if causal else 0
    )
    seen = torch.ones(shape.num_keys, dtype=torch.bool) if valid is None else valid[0]
    scores = importance(shape, method, seen, position if causal else None)
    block, num_blocks = method.block, scores.shape[-1]
    full = [c for c in range(num_blocks) if seen[c * block : (c + 1) * block].any()]
    read = torch.zeros(scores.shape, dtype=torch.bool)
    certain = torch.ones(scores.shape[:2], dtype=torch.bool)
    for h, i in itertools.product(range(shape.kv_heads), range(shape.num_queries)):
        at = int(position[i])
        visible = [c for c in full if not causal or c * block <= at]
        reach = method.window - 1 if causal else method.window // 2
        low, high = at - reach, at if causal else at + reach
        forced = []
        for c in visible:
            away = at // block - c
            local = has_place and abs(away) < method.local_blocks and (away >= 0 or not causal)
            if c < method.first_blocks or local:
                forced.append(c)
            in_window = c * block <= high and (c + 1) * block > low
            read[h, i, c] |= (has_place and in_window) or c < method.first_blocks
        rest = sorted((c for c in visible if c not in forced), key=lambda c: -scores[h, i, c])
        number = max(0, method.selected - len(forced))
        read[h, i, forced + rest[:number]] = True
        if 0 < number < len(rest):
            gap = scores[h, i, rest[number - 1]] - scores[h, i, rest[number]]
            certain[h, i] = gap > 1e-6 or bool(scores[h, i, rest[number - 1]] == 0)
    return read, certain


@settings(max_examples=25)  # the loops are slow
@given(
    shapes(max_tokens=130),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 8, 24]),
    st.sampled_from([(8, 4, 16), (4, 4, 8), (12, 4, 4)]),
    st.sampled_from([(3, 1, 2, 20), (2, 0, 1, 0), (5, 2, 1, 9)]),
)
def test_a_tile_reads_what_its_queries_read(
    shape: Shape,
    causal: bool,
    padded: bool,
    tile: int,
    sizes: tuple[int, int, int],
    counts: tuple[int, int, int, int],
) -> None:
    """By the definition, query by query and KV head by KV head."""
    q, k, v = shape.tensors()
    valid = None
    if padded:
        lengths = torch.randint(
            1, shape.num_keys + 1, (shape.batch, 1), generator=shape.generator()
        )
        valid = torch.arange(shape.num_keys) < lengths
        k = k.masked_fill(~valid[:, None, :, None], float("nan"))
    method = NSA(
        tile=tile,
        **dict(zip(("length", "stride", "block"), sizes, strict=True)),
        **dict(zip(("selected", "first_blocks", "local_blocks", "window"), counts, strict=True)),
    )
    plan = method.plan(q, k, v, gs.Call(causal=causal, key_valid=valid))
    plan.validate()
    read, certain = brute_force(shape, method, valid, causal=causal)
    assert isinstance(plan.keys, gs.KeyBlocks)
    got = plan.keys.to_mask(shape.num_keys).expand(-1, shape.heads, -1, -1)[0]
    for h, r in itertools.product(range(shape.heads), range(got.shape[1])):
        rows = torch.arange(r * tile, min((r + 1) * tile, shape.num_queries))
        if valid is not None and shape.num_queries == shape.num_keys:
            rows = rows[valid[0, rows]]
        if causal:
            rows = rows[rows + shape.num_keys - shape.num_queries >= 0]
        kv = h // shape.group
        if len(rows) == 0 or not certain[kv, rows].all():
            continue
        want = read[kv, rows].any(0)
        if causal and padded and shape.num_queries != shape.num_keys:
            assert not (want & ~got[h, r]).any()
            continue  # where the own block is padding, the last one before it is read beside
        if want.any():
            assert torch.equal(got[h, r], want)


def test_selection_is_shared_by_the_query_heads_of_a_kv_head() -> None:
    q, k, v = Shape(1, 2, 3, 512, 512, 16, 1).tensors()
    method = NSA(selected=4, window=0, tile=1)
    weights = method.plan(q, k, v).weights()[0].unflatten(0, (2, 3))
    assert torch.equal(weights[:, :1].expand_as(weights), weights)
    assert not torch.equal(weights[0], weights[1])
    # It is the sum over the group that decides, not any head alone.
    alone = method.plan(q[:, :1], k[:, :1], v[:, :1]).weights()
    assert not torch.equal(alone[0, 0], weights[0, 0])


@pytest.mark.parametrize("causal", [True, False])
def test_more_blocks_than_there_are_is_dense(causal: bool) -> None:
    """A count above the number of blocks is an index error in public code (BC17)."""
    for num_tokens in (1, 100, 257):
        shape = Shape(2, 1, 2, num_tokens, num_tokens, 20, 1)  # any head dim and group
        q, k, v = shape.tensors()
        for method in (NSA(selected=16), NSA(selected=999), NSA(density=1.0)):
            plan = method.plan(q, k, v, gs.Call(causal=causal))
            plan.validate()
            assert plan.density == 1.0
            seen = torch.ones(num_tokens, num_tokens)
            seen = (seen.tril() if causal else seen)[None, None]
            assert_matches(gs.attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


def test_the_first_the_local_and_the_window_blocks_are_always_read() -> None:
    q, k, v = Shape(1, 1, 1, 1024, 1024, 16, 1).tensors()
    weights = (
        NSA(selected=3, window=200, tile=64).plan(q, k, v, gs.Call(causal=True)).weights()[0, 0]
    )
    position, key = torch.arange(1024)[:, None], torch.arange(1024)
    seen = key <= position
    assert (weights[seen & (key < 64)] == 1).all()
    assert (weights[seen & (position - key < 200)] == 1).all()
    assert (weights[~seen] == 0).all()
    # Nothing but whole blocks of these: selection is used up by first and local blocks.
    far = seen & (key >= 64) & (key // 64 < (position // 64 * 64 - 199) // 64)
    assert (weights[far] == 0).all()
    both = NSA(selected=1, window=200, tile=64).plan(q, k, v).weights()[0, 0]
    assert (both[(position - key).abs() <= 100] == 1).all()


def test_future_runs_say_nothing_about_the_past() -> None:
    """A causal query is scored against runs that it sees whole, whatever follows."""
    q, k, v = Shape(1, 2, 2, 512, 512, 16, 1).tensors()
    call = gs.Call(causal=True)
    method = NSA(selected=4, window=64)
    before = method.plan(q, k, v, call).weights()[:, :, :256, :256]
    k = k.clone()
    k[:, :, 256:] = 100.0
    assert torch.equal(method.plan(q, k, v, call).weights()[:, :, :256, :256], before)


def test_no_trained_gate_weighs_the_branches() -> None:
    """Selected blocks and window are one softmax; compressed keys are not attended."""
    q, k, v = Shape(1, 1, 2, 400, 400, 16, 1).tensors()
    plan = NSA(selected=4, window=64).plan(q, k, v)
    assert isinstance(plan.keys, gs.KeyBlocks)
    got = gs.attend(q, k, v, plan)
    assert_matches(got, attention(q, k, v, plan.weights()), tolerance(q, k, v))


@pytest.mark.parametrize("num_tokens", [2048, 4097])
@pytest.mark.parametrize("density", [0.1, 0.15, 0.5])
@pytest.mark.parametrize("causal", [True, False])
def test_the_density_is_met_and_shared_with_the_window(
    num_tokens: int, density: float, causal: bool
) -> None:
    q, k, v = Shape(1, 1, 2, num_tokens, num_tokens, 16, 1).tensors()
    plan = gs.get_method("nsa", density=density).plan(q, k, v, gs.Call(causal=causal))
    assert abs(plan.density - density) <= 0.02
    if num_tokens > 2048:
        return
    weights = plan.weights()[0, 0]
    own = torch.arange(num_tokens)
    assert (weights[own, own] == 1).all()
    # At least a quarter of it is selected: neither the first block nor near.
    away = (own // 64 - own[:, None] // 64).abs()
    selected = (weights > 0) & (own >= 64) & (away > 1 + density * num_tokens / 256)
    assert density < 0.5 or selected.sum() > (weights > 0).sum() / 4


def test_padding_changes_neither_selection_nor_window() -> None:
    q, k, v = Shape(1, 1, 2, 1000, 1000, 16, 1).tensors()
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 300), value=float("nan")) for x in (q, k, v)]
    call = gs.Call(key_valid=(torch.arange(1300) < 1000)[None])
    for method in (NSA(selected=4, window=100), NSA(density=0.3)):
        alone = method.plan(q, k, v).weights()
        plan = method.plan(*padded, call)
        plan.validate()
        assert torch.equal(plan.weights()[:, :, :1000, :1000], alone)


def test_many_queries_are_planned_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(2, 2, 2, 500, 500, 16, 1)
    q, k, v = shape.tensors()
    valid = torch.arange(500) < torch.tensor([[500], [123]])
    for method in (NSA(selected=3, window=64), NSA(density=0.3)):
        monkeypatch.undo()
        whole = method.plan(q, k, v, gs.Call(key_valid=valid)).weights()
        monkeypatch.setattr("gossamer.methods.nsa._CHUNK_BYTES", 1)
        parts = method.plan(q, k, v, gs.Call(key_valid=valid)).weights()
        seen = valid[:, None].expand(-1, 4, -1)
        assert torch.equal(whole[seen], parts[seen])


@pytest.mark.parametrize(
    "params",
    [
        {"selected": 0},
        {"window": -1},
        {"first_blocks": True},
        {"length": 24},
        {"block": 40},
        {"density": math.inf},
        {"local_blocks": 0},
    ],
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(gs.PlanError, match=f"nsa: {next(iter(params))}="):
        NSA(**params)


@pytest.mark.parametrize("name", ["nsa", "sliding-window"])
def test_right_padding_leaves_causal_budgets_alone(name: str) -> None:
    """Queries of padding count no pairs, in ragged tiles neither."""
    method = gs.get_method(name, density=0.2)
    q, k, v = Shape(1, 1, 2, 1350, 1350, 16, 2).tensors()
    alone = method.plan(q, k, v, gs.Call(causal=True)).weights()
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 400), value=float("nan")) for x in (q, k, v))
    call = gs.Call(causal=True, key_valid=torch.arange(1750)[None] < 1350)
    padded = method.plan(q, k, v, call).weights()[..., :1350, :]
    assert torch.equal(padded[..., :1350], alone)
    assert not padded[..., 1350:].any()
