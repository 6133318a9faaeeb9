"""MoBA: chunks gated by their means per query token, the own chunk always chosen."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.methods.moba import MoBA
from oracle import assert_matches, attention, tolerance


def seen_by(shape: Shape, valid: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
    """Return the visible pairs [B, N, S] bool."""
    seen = torch.ones(shape.batch, shape.num_queries, shape.num_keys, dtype=torch.bool)
    if causal:
        seen &= torch.arange(shape.num_keys) <= (
            torch.arange(shape.num_queries)[:, None] + shape.num_keys - shape.num_queries
        )
    return seen if valid is None else seen & valid[:, None]


def choices(
    shape: Shape, method: MoBA, valid: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each query chooses by the definition [B, H, N, C], and where this is certain.

    It is not where two gates at the boundary are closer than rounding.
    """
    q, k, _ = shape.tensors()
    size = method.chunk or 0
    num_chunks = -(-shape.num_keys // size)
    chosen = torch.zeros(shape.batch, shape.heads, shape.num_queries, num_chunks, dtype=torch.bool)
    certain = torch.ones(chosen.shape[:3], dtype=torch.bool)
    shift = shape.num_keys - shape.num_queries if causal else 0
    has_own = causal or shape.num_queries == shape.num_keys
    for b, h in itertools.product(range(shape.batch), range(shape.heads)):
        ok = torch.ones(shape.num_keys, dtype=torch.bool) if valid is None else valid[b]
        means = {}
        for c in range(num_chunks):
            members = [j for j in range(c * size, min((c + 1) * size, shape.num_keys)) if ok[j]]
            if members:
                means[c] = k[b, h // shape.group, members].double().mean(0)
        for i in range(shape.num_queries):
            own = (i + shift) // size if has_own else -1
            gates = {
                c: math.inf if c == own else float(q[b, h, i].double() @ mean)
                for c, mean in means.items()
                if not causal or c <= own
            }
            best = sorted(gates, key=lambda c, gates=gates: -gates[c])
            chosen[b, h, i, best[: method.top_k]] = True
            if method.top_k < len(best):
                gap = gates[best[method.top_k - 1]] - gates[best[method.top_k]]
                certain[b, h, i] = gap > 1e-5
    return chosen, certain


@settings(max_examples=25)  # the loops are slow
@given(
    shapes(max_tokens=120),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(16, 1), (16, 16), (10, 4), (7, 128)]),
    st.sampled_from([1, 2, 3]),
)
def test_a_tile_reads_what_its_queries_choose(
    shape: Shape, causal: bool, padded: bool, sizes: tuple[int, int], top_k: int
) -> None:
    """By the definition, query by query; tile=1 is exact and greater tiles hold the union."""
    q, k, v = shape.tensors()
    valid = None
    if (
        padded
    ):  # right padding, so that every query sees a valid key of its own chunk or none at all
        lengths = torch.randint(
            1, shape.num_keys + 1, (shape.batch, 1), generator=shape.generator()
        )
        valid = torch.arange(shape.num_keys) < lengths
        k = k.masked_fill(~valid[:, None, :, None], float("nan"))
    method = MoBA(chunk=sizes[0], top_k=top_k, tile=sizes[1])
    plan = method.plan(q, k, v, gs.Call(causal=causal, key_valid=valid))
    plan.validate()
    chosen, certain = choices(shape, method, valid, causal=causal)
    queries = plan.query_index
    if queries is None:
        queries = torch.arange(-(-shape.num_queries // plan.tile) * plan.tile)
        queries = torch.where(queries < shape.num_queries, queries, -1).view(1, 1, -1, plan.tile)
    assert plan.tile == min(sizes)
    got = plan.weights().expand(shape.batch, shape.heads, -1, -1) > 0
    seen = seen_by(shape, valid, causal=causal)
    chunk_of = torch.arange(shape.num_keys) // sizes[0]
    self_attention = shape.num_queries == shape.num_keys
    for b, h in itertools.product(range(shape.batch), range(shape.heads)):
        for tile in queries[0, 0]:
            members = tile[tile >= 0].long()
            counted = members
            if valid is not None and self_attention:
                counted = members[valid[b, members]]
            if len(counted) == 0 or not certain[b, h, counted].all():
                continue
            union = chosen[b, h, counted].any(0)
            want = union[chunk_of] & seen[b, members]
            blind = (want.sum(-1) == 0) & (seen[b, members].sum(-1) > 0)
            if blind.any():  # padding inside the own chunk: another one is read beside it
                assert (want & ~got[b, h, members]).sum() == 0
                continue
            assert torch.equal(got[b, h, members], want)


@pytest.mark.parametrize("tile", [1, 16, 128])
def test_the_best_chunk_alone_is_the_own_chunk_cut_causally(tile: int) -> None:
    """The public code took a special case for top-1 that ran full causal attention (BC12)."""
    q, k, v = Shape(2, 1, 2, 96, 96, 16, 1).tensors()
    position = torch.arange(96)
    same = position // 32 == position[:, None] // 32
    for causal in (True, False):
        plan = MoBA(chunk=32, top_k=1, tile=tile).plan(q, k, v, gs.Call(causal=causal))
        want = same & (position <= position[:, None]) if causal else same
        assert torch.equal(plan.weights()[0, 0] > 0, want)
        out = gs.attend(q, k, v, plan)
        assert_matches(out, attention(q, k, v, want[None, None].float()), tolerance(q, k, v))


def test_the_own_chunk_counts_and_future_chunks_are_no_candidates() -> None:
    """Row i keeps min(k, i + 1) chunks (BC14), though later ones score higher."""
    q, k, v = Shape(1, 1, 1, 128, 128, 16, 1).tensors()
    q, k = torch.ones_like(q), torch.arange(128.0)[:, None].expand_as(k).clone()
    plan = MoBA(chunk=16, top_k=3).plan(q, k, v, gs.Call(causal=True))
    assert isinstance(plan.keys, gs.KeyBlocks)
    mask = plan.keys.to_mask(128)[0, 0]
    want = [[c in range(max(0, r - 2), r + 1) for c in range(8)] for r in range(8)]
    assert mask.tolist() == want


def test_a_ragged_last_chunk_is_a_candidate_for_all() -> None:
    """In the public code the tail is seen by its own queries alone."""
    q, k, v = Shape(1, 1, 1, 70, 70, 16, 1).tensors()
    q, k = torch.ones_like(q), k * 0.01
    k[:, :, 64:] = 1.0
    plan = MoBA(chunk=16, top_k=2).plan(q, k, v)
    assert (plan.weights()[..., 64:] == 1).all()


@pytest.mark.parametrize("num_queries", [300, 77, 200])
def test_tiles_keep_to_chunks_wherever_the_queries_stand(num_queries: int) -> None:
    """Bottom-right aligned, queries begin inside a chunk; no tile reaches over its end."""
    q, k, v = Shape(1, 1, 2, num_queries, 300, 16, 1).tensors()
    plan = MoBA(chunk=48, top_k=1, tile=32).plan(q, k, v, gs.Call(causal=True))
    plan.validate()
    position = torch.arange(num_queries)[:, None] + 300 - num_queries
    key = torch.arange(300)
    want = (key // 48 == position // 48) & (key <= position)
    assert torch.equal(plan.weights()[0, 0] > 0, want)


@pytest.mark.parametrize("top_k", [4, 99])
@pytest.mark.parametrize("causal", [True, False])
def test_as_many_chunks_as_there_are_is_dense(top_k: int, causal: bool) -> None:
    shape = Shape(2, 2, 2, 250, 250, 16, 1)
    q, k, v = shape.tensors()
    valid = torch.arange(250) < torch.tensor([[250], [100]])
    plan = MoBA(chunk=64, top_k=top_k).plan(q, k, v, gs.Call(causal=causal, key_valid=valid))
    assert plan.density == 1.0
    seen = seen_by(shape, valid, causal=causal)[:, None].float()
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


@pytest.mark.parametrize("num_tokens", [2048, 4097])
@pytest.mark.parametrize("density", [0.1, 0.15, 0.6])
@pytest.mark.parametrize("causal", [True, False])
def test_the_density_is_met_and_holds_the_own_chunk(
    num_tokens: int, density: float, causal: bool
) -> None:
    q, k, v = Shape(1, 2, 1, num_tokens, num_tokens, 16, 1).tensors()
    method = gs.get_method("moba", density=density)
    plan = method.plan(q, k, v, gs.Call(causal=causal))
    assert abs(plan.density - density) <= 0.02
    position = torch.arange(num_tokens)
    assert (plan.weights()[..., position, position] == 1).all()


def test_a_tiles_gate_is_the_mean_of_its_queries_gates() -> None:
    """Under a density: the chunk that the mean prefers, where most single queries prefer others."""
    q, k, v = Shape(1, 1, 1, 64, 64, 4, 1).tensors()
    k = torch.zeros_like(k)
    k[:, :, 16:32, 0] = 1.0
    k[:, :, 32:48, 1] = 1.0
    q = torch.zeros_like(q)
    q[..., 0] = 1.0  # all prefer the second chunk a little,
    q[:, :, ::16, 1] = 40.0  # one of each tile prefers the third by far
    plan = MoBA(density=0.5, chunk=16).plan(q, k, v)
    assert isinstance(plan.keys, gs.KeyBlocks)
    mask = plan.keys.to_mask(64)[0, 0]
    assert mask[:, 2].all()
    assert mask.diagonal().all()
    assert mask.sum(-1).tolist() == [2, 2, 2, 2] or mask.sum() == 8


def test_padding_inside_the_own_chunk_leaves_no_query_without_keys() -> None:
    """Left padding may reach into a chunk, and keys may be padded where queries are not."""
    for length, total in ((40, 100), (100, 100)):
        shape = Shape(2, 1, 1, length, total, 16, 1)
        q, k, v = shape.tensors()
        valid = torch.ones(2, total, dtype=torch.bool)
        valid[0, :90] = False
        valid[1, 64:97] = False
        plan = MoBA(chunk=32, top_k=1).plan(q, k, v, gs.Call(causal=True, key_valid=valid))
        plan.validate()


def test_short_sequences_have_shorter_chunks() -> None:
    for length, chunk in ((300, 64), (4097, 192), (75600, 2048)):
        q = torch.randn(1, 1, length, 8)
        plan = MoBA().plan(q, q, q)
        assert isinstance(plan.keys, gs.KeyBlocks)
        assert plan.keys.block == chunk


@pytest.mark.parametrize(
    "params", [{"top_k": 0}, {"chunk": -1}, {"tile": 0}, {"density": 0.0}, {"top_k": True}]
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(gs.PlanError, match=f"moba: {next(iter(params))}="):
        MoBA(**params)
