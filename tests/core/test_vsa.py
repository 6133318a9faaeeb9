"""VSA: cubes of the grid, ragged where it is no multiple, and the top cubes of the coarse map."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape
from gossamer.methods.vsa import VSA
from oracle import assert_matches, attention, tolerance

sides = st.integers(1, 5)


def cube_of(grid: tuple[int, int, int], cube: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return which cube each token lies in, by its coordinates."""
    return [
        (f // cube[0], r // cube[1], c // cube[2])
        for f, r, c in itertools.product(*(range(side) for side in grid))
    ]


@settings(max_examples=20)  # the loops are slow
@given(
    st.tuples(sides, sides, sides),
    st.sampled_from([(4, 4, 4), (2, 3, 2), (1, 1, 5)]),
    st.integers(0, 99),
    st.booleans(),
)
def test_plans_are_those_of_the_definition(
    grid: tuple[int, int, int], cube: tuple[int, int, int], seed: int, padded: bool
) -> None:
    length = math.prod(grid)
    shape = Shape(2, 2, 2, length, length, 16, seed)
    q, k, v = shape.tensors()
    seen = torch.ones(2, length, dtype=torch.bool)
    if padded:
        seen = torch.rand(2, length, generator=shape.generator()) < 0.7
        seen[:, 0] = True
        q, k, v = (x.masked_fill(~seen[:, None, :, None], float("nan")) for x in (q, k, v))
    method = VSA(keep=0.4, cube=cube)
    call = gs.Call(grid=grid, key_valid=seen if padded else None)
    plan = method.plan(q, k, v, call)
    plan.validate()
    got = plan.weights().expand(2, 4, -1, -1)
    of = cube_of(grid, cube)
    for b, h in itertools.product(range(2), range(4)):
        members = {
            c: [t for t in range(length) if of[t] == c and seen[b, t]] for c in sorted(set(of))
        }
        members = {c: tokens for c, tokens in members.items() if tokens}
        number = math.ceil(len(members) * 0.4)
        for own, queries in members.items():
            mean = q[b, h, queries].double().mean(0)
            scores = {c: float(mean @ k[b, h // 2, t].double().mean(0)) for c, t in members.items()}
            best = sorted(scores, key=lambda c, scores=scores: -scores[c])
            if number < len(best) and scores[best[number - 1]] - scores[best[number]] < 1e-5:
                continue  # float32 rounding may decide
            want = torch.zeros(length)
            want[[t for c in best[:number] for t in members[c]]] = 1.0
            assert torch.equal(got[b, h, queries], want.expand(len(queries), -1)), own


@pytest.mark.parametrize("cube", [(4, 4, 4), (4, 8, 8)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 5, 7), (5, 9, 11), (8, 7, 13), (4, 8, 8)])
def test_any_grid_is_cut_and_put_together(
    grid: tuple[int, int, int], cube: tuple[int, int, int]
) -> None:
    """Floored cube counts lose the tokens at the borders (BC38)."""
    length = math.prod(grid)
    q, k, v = Shape(1, 1, 2, length, length, 16, 1).tensors()
    plan = VSA(density=1.0, cube=cube).plan(q, k, v, gs.Call(grid=grid))
    plan.validate()
    assert plan.query_index is not None
    assert isinstance(plan.keys, gs.KeyBlocks)
    assert plan.keys.key_order is not None
    for places in (plan.query_index, plan.keys.key_order):
        tokens = places.flatten().sort().values
        assert torch.equal(tokens[-length:], torch.arange(length, dtype=torch.int32))
        assert (tokens[:-length] == -1).all()
    assert plan.density == 1.0
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_means_are_of_true_tokens() -> None:
    """A border cube of one token is not averaged with the holes around it (BC20)."""
    q, k, v = Shape(1, 1, 1, 65, 65, 16, 1).tensors()
    q, k = torch.ones_like(q), k * 0.01
    k[:, :, 64] = 0.5  # its cube's mean, were the 63 holes counted: 0.008, below the others'
    k[:, :, :64] += 0.1
    for grid, cube in (((1, 1, 65), (1, 1, 64)), ((1, 65, 1), (4, 64, 4))):
        plan = VSA(keep=0.5, cube=cube).plan(q, k, v, gs.Call(grid=grid))
        assert torch.equal(plan.weights()[0, 0].sum(-1), torch.ones(65))
        assert (plan.weights()[0, 0, :, 64] == 1).all()


def test_no_coarse_output_is_added_without_a_gate() -> None:
    """What is attended is the chosen tokens alone: their softmax, nothing beside it."""
    q, k, v = Shape(1, 2, 2, 240, 240, 16, 1).tensors()
    plan = VSA(keep=0.3).plan(q, k, v, gs.Call(grid=(4, 6, 10)))
    got = gs.attend(q, k, v, plan)
    assert_matches(got, attention(q, k, v, plan.weights()), tolerance(q, k, v))


@pytest.mark.parametrize("grid", [None, (13, 16, 20), (8, 16, 16), (1, 64, 65), (3, 33, 21)])
@pytest.mark.parametrize("density", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_the_density_is_met_on_any_grid(grid: tuple[int, int, int] | None, density: float) -> None:
    length = 2048 if grid is None else math.prod(grid)
    q, k, v = Shape(1, 2, 1, length, length, 16, 1).tensors()
    plan = gs.get_method("vsa", density=density).plan(q, k, v, gs.Call(grid=grid))
    assert abs(plan.density - density) <= 0.02


def test_a_sequence_without_a_grid_is_cut_into_runs() -> None:
    q, k, v = Shape(1, 1, 1, 200, 200, 16, 1).tensors()
    plan = VSA(keep=0.3).plan(q, k, v)
    assert plan.tile == 64
    rows = plan.weights()[0, 0]
    assert torch.equal(rows[0].expand(64, -1), rows[:64])
    assert (rows.sum(-1) >= 72).all()  # two runs of 64, 64, 64 and 8
    crossed = VSA(keep=0.3).plan(q[:, :, :70], k, v)
    crossed.validate()
    assert crossed.weights().shape == (1, 1, 70, 200)


def test_text_beside_a_ragged_grid_is_full() -> None:
    """Text is exempt, though neither grid nor text is block-aligned."""
    q, k, v = Shape(1, 1, 1, 105 + 20, 105 + 20, 16, 1).tensors()
    for text in ((0, 20), (105, 125), (50, 70)):
        plan = VSA(keep=0.3).plan(q, k, v, gs.Call(grid=(3, 5, 7), text=text))
        plan.validate()
        rows = slice(*text)
        assert (plan.weights()[..., rows] == 1).all()
        assert (plan.weights()[:, :, rows] == 1).all()


def test_causal_calls_are_refused_with_the_reason() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 16, 1).tensors()
    with pytest.raises(gs.UnsupportedError, match="mixes positions"):
        VSA().plan(q, k, v, gs.Call(causal=True))


@pytest.mark.parametrize(
    "params",
    [{"keep": 0}, {"density": 2}, {"cube": (4, 4)}, {"cube": 4}],
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(gs.PlanError, match=f"vsa: {next(iter(params))}="):
        VSA(**params)
    with pytest.raises(gs.PlanError, match="vsa: cube=0"):
        VSA(cube=(4, 0, 4))


def test_parameters_come_back_from_a_file_as_they_were() -> None:
    assert VSA(cube=[4, 8, 8]) == VSA(cube=(4, 8, 8))  # TOML knows lists alone
    assert VSA(**VSA(cube=(2, 2, 2)).params()) == VSA(cube=(2, 2, 2))
