"""DraftAttention: regions of each frame and the top entries of the whole draft map."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape
from gossamer.methods.draft import DraftAttention
from oracle import assert_matches, attention, tolerance


@settings(max_examples=20)  # the loops are slow
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    st.sampled_from([(2, 3), (8, 16), (1, 4)]),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from([0.1, 0.35, 0.8]),
)
def test_plans_are_those_of_the_definition(
    grid: tuple[int, int, int],
    region: tuple[int, int],
    seed: int,
    padded: bool,
    density: float,
) -> None:
    """Each row's best, then the largest entries of the head's map until the budget is spent."""
    length = math.prod(grid)
    shape = Shape(2, 2, 2, length, length, 16, seed)
    q, k, v = shape.tensors()
    seen = torch.ones(2, length, dtype=torch.bool)
    if padded:
        seen = torch.rand(2, length, generator=shape.generator()) < 0.7
        seen[:, 0] = True
        q, k, v = (x.masked_fill(~seen[:, None, :, None], float("nan")) for x in (q, k, v))
    call = gs.Call(grid=grid, key_valid=seen if padded else None)
    plan = DraftAttention(density=density, region=region).plan(q, k, v, call)
    plan.validate()
    got = plan.weights().expand(2, 4, -1, -1)
    of = [
        (f, r // region[0], c // region[1])
        for f, r, c in itertools.product(*(range(side) for side in grid))
    ]
    for b, h in itertools.product(range(2), range(4)):
        members = [[t for t in range(length) if of[t] == c and seen[b, t]] for c in sorted(set(of))]
        members = [tokens for tokens in members if tokens]
        mean_q = torch.stack([q[b, h, tokens].double().mean(0) for tokens in members])
        mean_k = torch.stack([k[b, h // 2, tokens].double().mean(0) for tokens in members])
        draft = (mean_q @ mean_k.T / 4).softmax(-1)
        pairs = sorted(
            ((float(draft[i, j]), i, j) for i in range(len(draft)) for j in range(len(draft))),
            key=lambda pair: -pair[0],
        )
        best = [int(row.argmax()) for row in draft]
        kept = set(enumerate(best))
        left = density * len([t for m in members for t in m]) ** 2
        left -= sum(len(members[i]) * len(members[j]) for i, j in kept)
        certain = all(a[0] - b[0] > 1e-6 for a, b in itertools.pairwise(pairs))
        for _, i, j in pairs:
            area = len(members[i]) * len(members[j])
            if (i, j) in kept:
                continue
            if left <= area * 0.31:  # the crossing pair is kept if its greater part fits
                if left > area * 0.2:
                    certain = False
                break
            kept.add((i, j))
            left -= area
        if not certain:
            continue
        for i, queries in enumerate(members):
            want = torch.zeros(length)
            want[[t for j in range(len(members)) if (i, j) in kept for t in members[j]]] = 1.0
            assert torch.equal(got[b, h, queries], want.expand(len(queries), -1))


def test_flat_rows_keep_their_best_region() -> None:
    """Half the rows are flat and lose against peaked ones: the public code leaves them empty."""
    shape = Shape(1, 1, 1, 2048, 2048, 16, 1)
    q, k, v = shape.tensors()
    q[:, :, 1024:] *= 1e-3
    q[:, :, :1024] += 8 * k[:, :, :1024]
    call = gs.Call(grid=(4, 16, 32))
    plan = DraftAttention(density=0.1).plan(q, k, v, call)
    plan.validate()
    read = plan.weights()[0, 0].sum(-1)
    assert (read >= 128).all()
    assert plan.density == pytest.approx(0.1, abs=0.02)


@given(st.integers(0, 99))
def test_no_row_is_empty_where_rows_share_a_budget(seed: int) -> None:
    """Rows differ in level, so that a flattened top-k would fill some and empty others (BC15)."""
    shape = Shape(1, 1, 1, 64, 64, 16, seed)
    q, k, v = shape.tensors()
    q = q * torch.arange(1.0, 9.0).repeat_interleave(8)[:, None]  # sharper row by row
    plan = DraftAttention(density=0.25, region=(1, 8)).plan(q, k, v, gs.Call(grid=(1, 8, 8)))
    per_row = plan.weights()[0, 0, ::8, ::8].sum(-1)
    assert (per_row >= 1).all()
    assert per_row.sum() == 16  # of 64, as asked


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 5, 7), (5, 9, 11), (2, 9, 17), (1, 27, 40)])
def test_any_grid_is_cut_into_regions_of_one_frame(grid: tuple[int, int, int]) -> None:
    """The public code asks for multiples of 8 and 16; 27 x 40 are none (BC38)."""
    length = math.prod(grid)
    q, k, v = Shape(1, 1, 1, length, length, 16, 1).tensors()
    plan = DraftAttention(density=0.3).plan(q, k, v, gs.Call(grid=grid))
    plan.validate()
    assert plan.query_index is not None
    frame = torch.div(plan.query_index[0, 0], grid[1] * grid[2], rounding_mode="floor")
    inside = plan.query_index[0, 0] >= 0
    assert all(len(set(f[i].tolist())) == 1 for f, i in zip(frame, inside, strict=True))
    full = DraftAttention(density=1.0).plan(q, k, v, gs.Call(grid=grid))
    assert full.density == 1.0
    assert_matches(gs.attend(q, k, v, full), attention(q, k, v), tolerance(q, k, v))


@pytest.mark.parametrize("grid", [None, (13, 16, 20), (4, 16, 32), (5, 30, 26), (3, 33, 21)])
@pytest.mark.parametrize("density", [0.15, 0.3, 0.5, 0.9])
def test_the_density_is_met_on_any_grid(grid: tuple[int, int, int] | None, density: float) -> None:
    length = 2048 if grid is None else math.prod(grid)
    q, k, v = Shape(1, 2, 1, length, length, 16, 1).tensors()
    plan = gs.get_method("draft", density=density).plan(q, k, v, gs.Call(grid=grid))
    assert abs(plan.density - density) <= 0.02


def test_text_is_full_whatever_the_map_says() -> None:
    q, k, v = Shape(2, 1, 2, 105 + 20, 105 + 20, 16, 1).tensors()
    valid = torch.arange(125) < torch.tensor([[125], [115]])
    for text in ((0, 20), (105, 125), (50, 70)):
        call = gs.Call(grid=(3, 5, 7), text=text, key_valid=valid)
        plan = DraftAttention(density=0.2, region=(2, 4)).plan(q, k, v, call)
        plan.validate()
        seen = valid[:, None, None].expand(2, plan.heads, 125, 125)
        rows = slice(*text)
        weights = plan.weights() > 0
        assert torch.equal(weights[..., rows], seen[..., rows])
        assert torch.equal(weights[:, :, rows], seen[:, :, rows])


def test_sharp_maps_do_not_underflow_to_ties() -> None:
    """Softmax probabilities of very unequal logits are 0 in float32; their logs still rank."""
    q, k, v = Shape(1, 1, 1, 64, 64, 16, 1).tensors()
    q = torch.ones_like(q) * 100
    k = torch.arange(8.0, 0.0, -1.0).repeat_interleave(8)[:, None].expand_as(k).clone().flip(2)
    plan = DraftAttention(density=0.5, region=(1, 8)).plan(q, k, v, gs.Call(grid=(1, 8, 8)))
    # The four best regions of every row are the last ones.
    assert (plan.weights()[0, 0, :, 32:] == 1).all()
    assert (plan.weights()[0, 0, :, :32] == 0).all()


def test_causal_calls_are_refused_with_the_reason() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 16, 1).tensors()
    with pytest.raises(gs.UnsupportedError, match="mixes positions"):
        DraftAttention().plan(q, k, v, gs.Call(causal=True))


@pytest.mark.parametrize("params", [{"density": 0}, {"region": (8,)}, {"region": "8x16"}])
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(gs.PlanError, match=f"draft: {next(iter(params))}="):
        DraftAttention(**params)
