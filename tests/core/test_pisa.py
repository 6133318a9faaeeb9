"""PISA: exact blocks by the score of means, every other block as one weighted key."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.methods.pisa import PISA
from oracle import assert_matches, attention, tolerance


def brute_force(
    shape: Shape, method: PISA, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plan's weights [B, H, N, S + E] by the definition, and whether rows are certain.

    A row is uncertain where two scores at its boundary are closer than float32 rounding.
    """
    q, k, _ = shape.tensors()
    block, tile = method.block, method.tile
    num_blocks = -(-shape.num_keys // block)
    aligned = shape.num_queries == shape.num_keys
    weights = torch.zeros(shape.batch, shape.heads, shape.num_queries, shape.num_keys + num_blocks)
    certain = torch.ones(weights.shape[:3], dtype=torch.bool)
    for b, h in itertools.product(range(shape.batch), range(shape.heads)):
        seen = torch.ones(shape.num_keys, dtype=torch.bool) if valid is None else valid[b]
        members = [
            [j for j in range(c * block, min((c + 1) * block, shape.num_keys)) if seen[j]]
            for c in range(num_blocks)
        ]
        full = [c for c in range(num_blocks) if members[c]]
        number = max(1, math.ceil(len(full) * method.exact))
        means = {c: k[b, h // shape.group, members[c]].double().mean(0) for c in full}
        for begin in range(0, shape.num_queries, tile):
            rows = list(range(begin, min(begin + tile, shape.num_queries)))
            counted = [i for i in rows if not aligned or seen[i]]
            mean = q[b, h, counted].double().mean(0) if counted else torch.zeros(shape.dim).double()
            scores = {c: float(mean @ means[c]) for c in full}
            best = sorted(full, key=lambda c, scores=scores: (-scores[c], c))
            exact = best[:number]
            if number < len(best):
                gap = scores[best[number - 1]] - scores[best[number]]
                certain[b, h, rows] = gap > 1e-5 or not counted
            for c in full:
                if c in exact:
                    for j in members[c]:
                        weights[b, h, rows, j] = 1.0
                else:
                    weights[b, h, rows, shape.num_keys + c] = len(members[c])
    return weights, certain


@settings(max_examples=30)  # the loops are slow
@given(shapes(max_tokens=200), st.booleans(), st.sampled_from([(64, 64), (16, 32), (7, 5)]))
def test_plans_are_those_of_the_definition(
    shape: Shape, padded: bool, sizes: tuple[int, int]
) -> None:
    q, k, v = shape.tensors()
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.7
        valid[:, -1] = True
        k = k.masked_fill(~valid[:, None, :, None], float("nan"))
    method = PISA(exact=0.3, block=sizes[0], tile=sizes[1])
    plan = method.plan(q, k, v, gs.Call(key_valid=valid))
    plan.validate()
    want, certain = brute_force(shape, method, valid)
    got = plan.weights().expand_as(want)
    torch.testing.assert_close(got[certain], want[certain], rtol=1e-6, atol=0.0)


def test_the_rest_stands_in_the_same_softmax_at_zeroth_order() -> None:
    """Blocks of equal keys and values are summed exactly by their means: dense at any density.

    The public code does not rescale the approximated part's denominator when the running maximum
    grows between groups, so that its outputs shrink there: here keys grow by blocks.
    """
    shape = Shape(1, 2, 2, 300, 300, 16, 1)
    q, k, v = shape.tensors()
    of_block = (torch.arange(300) // 64) * 64
    grow = 1 + 3.0 * (torch.arange(300) // 64)[:, None]
    k, v = k[:, :, of_block] * grow, v[:, :, of_block]
    out = gs.attend(q, k, v, PISA(exact=0.2).plan(q, k, v))
    assert_matches(out, attention(q, k, v), tolerance(q, k, v))


@pytest.mark.parametrize("num_tokens", [2048, 4097])
@pytest.mark.parametrize("density", [0.05, 0.15, 0.3, 0.9])
def test_exact_and_virtual_keys_together_meet_the_density(num_tokens: int, density: float) -> None:
    q, k, v = Shape(1, 1, 2, num_tokens, num_tokens, 16, 1).tensors()
    plan = gs.get_method("pisa", density=density).plan(q, k, v)
    assert abs(plan.density - density) <= 0.02
    weights = plan.weights()
    assert (weights[..., num_tokens:] > 0).any()
    # Every block is read once: exactly or as its mean. So the weights add up to all keys.
    torch.testing.assert_close(weights.sum(-1), torch.full(weights.shape[:3], float(num_tokens)))


def test_a_density_below_the_virtual_keys_keeps_one_exact_block_a_row() -> None:
    q, k, v = Shape(1, 2, 1, 2048, 2048, 16, 1).tensors()
    plan = gs.get_method("pisa", density=0.001).plan(q, k, v)
    weights = plan.weights()
    assert (weights[..., :2048].sum(-1) == 64).all()
    assert plan.density == pytest.approx((64 + 31) / 2048)


@pytest.mark.parametrize("method", [PISA(density=1.0), PISA(exact=1.0), PISA(exact=1.0, block=7)])
def test_a_full_budget_reads_no_virtual_key(method: PISA) -> None:
    q, k, v = Shape(2, 1, 2, 300, 300, 16, 1).tensors()
    valid = torch.arange(300) < torch.tensor([[300], [77]])
    plan = method.plan(q, k, v, gs.Call(key_valid=valid))
    assert plan.density == 1.0
    assert not (plan.weights()[..., 300:] > 0).any()
    got = gs.attend(q, k, v, plan)
    assert_matches(got, attention(q, k, v, valid[:, None, None].float()), tolerance(q, k, v))


def test_text_is_read_exactly_and_reads_everything() -> None:
    """The public code does not force text, and counts on 4096 image tokens."""
    q, k, v = Shape(1, 1, 2, 377, 377, 16, 1).tensors()
    for text in ((0, 77), (300, 377), (150, 227)):
        plan = PISA(exact=0.2).plan(q, k, v, gs.Call(text=text))
        plan.validate()
        weights = plan.weights()
        rows = slice(*text)
        assert (weights[:, :, rows, :377] == 1).all()
        assert (weights[:, :, rows, 377:] == 0).all()
        assert (weights[..., rows] == 1).all()
        latent = torch.ones(377, dtype=torch.bool)
        latent[rows] = False
        assert (weights[:, :, latent].sum(-1) == 377).all()
        out = gs.attend(q, k, v, plan).out[:, :, rows]
        assert (out - attention(q, k, v).out[:, :, rows]).abs().max() <= tolerance(q, k, v).out
        renewed = plan.refresh(k, v)
        torch.testing.assert_close(gs.attend(q, k, v, renewed), gs.attend(q, k, v, plan))


def test_a_plan_of_an_earlier_step_takes_the_new_steps_means() -> None:
    q, k, v = Shape(1, 2, 2, 300, 300, 16, 1).tensors()
    plan = PISA(exact=0.2).plan(q, k, v)
    k2, v2 = k.flip(2) * 2, v + 1
    renewed = plan.refresh(k2, v2)
    want = renewed.keys
    assert isinstance(want, gs.KeyTokens)
    assert want.extra_k is not None
    block = k2[:, :, 64:128].mean(2)
    torch.testing.assert_close(want.extra_k[:, :, 1], block)
    # Attention of the renewed plan: every block of equal keys is exact again.
    same_k, same_v = k2[:, :, torch.arange(300) // 64 * 64], v2[:, :, torch.arange(300) // 64 * 64]
    got = gs.attend(q, same_k, same_v, plan.refresh(same_k, same_v))
    assert_matches(got, attention(q, same_k, same_v), tolerance(q, same_k, same_v))


def test_means_keep_the_dtype_and_padding_changes_nothing() -> None:
    shape = Shape(2, 1, 2, 200, 200, 16, 1)
    q, k, v = shape.tensors(torch.bfloat16)
    plan = PISA(exact=0.3).plan(q, k, v)
    assert isinstance(plan.keys, gs.KeyTokens)
    assert plan.keys.extra_k is not None
    assert plan.keys.extra_k.dtype == torch.bfloat16
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 90), value=float("nan")) for x in (q, k, v)]
    call = gs.Call(key_valid=(torch.arange(290) < 200)[None])
    other = PISA(exact=0.3).plan(*padded, call).weights()
    virtual = torch.cat([other[:, :, :200, :200], other[:, :, :200, 290:294]], -1)
    assert torch.equal(virtual, plan.weights())
    assert not (other[:, :, :, 294:] > 0).any()


def test_causal_calls_are_refused_with_the_reason() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 16, 1).tensors()
    with pytest.raises(gs.UnsupportedError, match="mean mixes positions"):
        PISA().plan(q, k, v, gs.Call(causal=True))


@pytest.mark.parametrize(
    "params", [{"exact": 0}, {"exact": 1.1}, {"density": -1}, {"block": 0}, {"tile": 1.5}]
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(gs.PlanError, match=f"pisa: {next(iter(params))}="):
        PISA(**params)


@pytest.mark.parametrize("exact", [0.1, 0.3, 0.7])
def test_the_number_of_exact_blocks_is_rounded_as_written(exact: float) -> None:
    """0.3 of 10 blocks is 3 of them, though 10 * 0.3 is above 3 in float32."""
    q, k, v = Shape(1, 1, 1, 640, 640, 16, 1).tensors()
    weights = PISA(exact=exact).plan(q, k, v).weights()[..., :640]
    assert (weights.sum(-1) == 64 * round(10 * exact)).all()
