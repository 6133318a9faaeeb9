"""Sol-Attn: exact blocks above a predicted threshold, every other block as one weighted key."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.methods.sol import SolAttn
from oracle import assert_matches, attention, tolerance


def brute_force(
    shape: Shape, method: SolAttn, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plan's weights by the definition, and the rows in which rounding cannot matter."""
    q, k, _ = shape.tensors()
    size = method.block
    num_blocks = -(-shape.num_keys // size)
    aligned = shape.num_queries == shape.num_keys
    scale = shape.dim**-0.5
    weights = torch.zeros(shape.batch, shape.heads, shape.num_queries, shape.num_keys + num_blocks)
    certain = torch.ones(weights.shape[:3], dtype=torch.bool)
    for b, h in itertools.product(range(shape.batch), range(shape.heads)):
        seen = torch.ones(shape.num_keys, dtype=torch.bool) if valid is None else valid[b]
        members = [
            [j for j in range(c * size, min((c + 1) * size, shape.num_keys)) if seen[j]]
            for c in range(num_blocks)
        ]
        full = [c for c in range(num_blocks) if members[c]]
        means = torch.stack([k[b, h // shape.group, members[c]].double().mean(0) for c in full])
        mu, var = means.mean(0), means.var(0, correction=0)
        for begin in range(0, shape.num_queries, method.tile):
            rows = list(range(begin, min(begin + method.tile, shape.num_queries)))
            counted = [i for i in rows if not aligned or seen[i]]
            # Each query's own scores, averaged: not the score of the mean.
            tokens = q[b, h, counted].double() if counted else torch.zeros(1, shape.dim).double()
            scores = (tokens @ means.T * scale).mean(0)
            mean = tokens.mean(0)
            threshold = scale * (mean @ mu + method.tau * (mean.square() @ var).sqrt())
            certain[b, h, rows] = bool((scores - threshold).abs().min() > 1e-5) and bool(counted)
            for c, score in zip(full, scores, strict=True):
                near = aligned and any(
                    abs(i // size - c) <= method.near for i in range(begin, begin + method.tile)
                )
                if score > threshold or near or c < method.first_blocks:
                    for j in members[c]:
                        weights[b, h, rows, j] = 1.0
                else:
                    weights[b, h, rows, shape.num_keys + c] = len(members[c])
    return weights, certain


@settings(max_examples=30)  # the loops are slow
@given(
    shapes(max_tokens=200),
    st.booleans(),
    st.sampled_from([(64, 64), (16, 32), (7, 5), (8, 8)]),
    st.sampled_from([(-0.5, 0, 0), (1.0, 1, 0), (0.5, 0, 2)]),
)
def test_plans_are_those_of_the_definition(
    shape: Shape, padded: bool, sizes: tuple[int, int], rule: tuple[float, int, int]
) -> None:
    q, k, v = shape.tensors()
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.7
        valid[:, -1] = True
        k = k.masked_fill(~valid[:, None, :, None], float("nan"))
    tau, near, first = rule
    method = SolAttn(tau=tau, near=near, first_blocks=first, block=sizes[0], tile=sizes[1])
    plan = method.plan(q, k, v, gs.Call(key_valid=valid))
    plan.validate()
    want, certain = brute_force(shape, method, valid)
    got = plan.weights().expand_as(want)
    torch.testing.assert_close(got[certain], want[certain], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("tau", [-1000.0, -math.inf])
def test_a_low_threshold_is_dense(tau: float) -> None:
    """The gate by which adapters test each shape: all blocks exact equals dense attention."""
    for num_tokens in (1, 63, 64, 300):
        q, k, v = Shape(2, 2, 2, num_tokens, num_tokens, 16, 1).tensors()
        plan = SolAttn(tau=tau, near=0).plan(q, k, v)
        assert plan.density == 1.0
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_no_block_above_the_threshold_leaves_the_forced_ones_exactly() -> None:
    """A budget of nothing is not raised to one where forced blocks cover the row (BC18)."""
    q, k, v = Shape(1, 1, 1, 320, 320, 16, 1).tensors()
    for method in (SolAttn(tau=math.inf, near=0, first_blocks=1), SolAttn(density=1e-6, near=0)):
        exact = method.plan(q, k, v).weights()[0, 0, ::64, :320:64] > 0
        assert torch.equal(exact, torch.eye(5, dtype=torch.bool) | (exact & (torch.arange(5) < 1)))
        assert exact[:, 0].all() == (method.first_blocks == 1)
    none = SolAttn(tau=math.inf, near=0)
    plan = none.plan(q, k[:, :, :200], v[:, :, :200])  # no block is a tile's own
    assert not (plan.weights()[..., :200] > 0).any()
    assert (plan.weights().sum(-1) == 200).all()
    plan.validate()


def test_identical_blocks_have_no_deviation_and_none_stands_out() -> None:
    x = torch.ones(1, 1, 300, 16)
    plan = SolAttn(near=1).plan(x, x, x)
    exact = plan.weights()[0, 0, ::64, :300:64] > 0
    block = torch.arange(5)
    assert torch.equal(exact, (block - block[:, None]).abs() <= 1)
    torch.testing.assert_close(gs.attend(x, x, x, plan).out, x)


def test_about_a_sixth_of_random_blocks_exceeds_one_deviation() -> None:
    """Scores over many blocks are near normal: 16%, 7% and 2.7% are the published shares."""
    q, k, v = Shape(1, 2, 1, 4096, 4096, 64, 1).tensors()
    for tau, share in ((1.0, 0.159), (1.5, 0.067), (2.0, 0.023)):
        weights = SolAttn(tau=tau, near=0).plan(q, k, v).weights()
        exact = (weights[..., ::64, :4096:64] > 0).double().mean() - 1 / 64  # the own blocks
        number = 2 * 64 * 64
        assert abs(float(exact) - share) < 4 * math.sqrt(share / number) + share / 64 + 0.005


@pytest.mark.parametrize("num_tokens", [2048, 4097])
@pytest.mark.parametrize("density", [0.15, 0.5])
def test_exact_and_virtual_keys_together_meet_the_density(num_tokens: int, density: float) -> None:
    q, k, v = Shape(1, 1, 2, num_tokens, num_tokens, 16, 1).tensors()
    plan = gs.get_method("sol", density=density).plan(q, k, v)
    assert abs(plan.density - density) <= 0.02
    weights = plan.weights()
    assert (weights.sum(-1) == num_tokens).all()  # every block once, exactly or as its mean
    block = torch.arange(num_tokens) // 64
    assert (weights[..., :num_tokens][..., (block - block[:, None]).abs() <= 1] > 0).all()


def test_text_rows_are_dense_and_renewing_keeps_them_so() -> None:
    q, k, v = Shape(2, 1, 2, 377, 377, 16, 1).tensors()
    valid = torch.arange(377) < torch.tensor([[377], [250]])
    plan = SolAttn(near=0).plan(q, k, v, gs.Call(text=(100, 177), key_valid=valid))
    plan.validate()
    rows = slice(100, 177)
    want = attention(q, k, v, valid[:, None, None].float()).out[:, :, rows]
    for each in (plan, plan.refresh(k, v)):
        got = gs.attend(q, k, v, each).out[:, :, rows]
        assert (got - want).abs().max() <= tolerance(q, k, v).out


def test_padding_changes_nothing() -> None:
    q, k, v = Shape(2, 1, 2, 300, 300, 16, 1).tensors()
    alone = SolAttn().plan(q, k, v).weights()
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 200), value=float("nan")) for x in (q, k, v)]
    call = gs.Call(key_valid=(torch.arange(500) < 300)[None])
    other = SolAttn().plan(*padded, call).weights()[:, :, :300]
    assert torch.equal(torch.cat([other[..., :300], other[..., 500:505]], -1), alone)


def test_causal_calls_are_refused_with_the_reason() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 16, 1).tensors()
    with pytest.raises(gs.UnsupportedError, match="mean mixes positions"):
        SolAttn().plan(q, k, v, gs.Call(causal=True))


@pytest.mark.parametrize(
    "params",
    [
        {"tau": float("nan")},
        {"tau": "high"},
        {"near": -1},
        {"first_blocks": 1.5},
        {"density": 0},
        {"block": 0},
    ],
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(gs.PlanError, match=f"sol: {next(iter(params))}="):
        SolAttn(**params)
