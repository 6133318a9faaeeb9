"""CLEAR against its definition, query by query."""

import itertools

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods.clear import Clear
from gossamer.testing import assert_matches, attention, tolerance


def plan_of(
    method: gs.Method, grid: tuple[int, int, int], text: tuple[int, int] | None = None
) -> gs.SparsePlan:
    total = grid[0] * grid[1] * grid[2] + (text[1] - text[0] if text else 0)
    q, k, v = Shape(1, 2, 1, total, total, 8, 1).tensors()
    plan = method.plan(q, k, v, gs.Call(grid=grid, text=text))
    plan.validate()
    return plan


def disc(grid: tuple[int, int, int], radius: float, frame_distance: float) -> torch.Tensor:
    """Return the definition, [N, N]."""
    tokens = list(itertools.product(*(range(n) for n in grid)))
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, (f, r, c) in enumerate(tokens):
        for j, (g, s, d) in enumerate(tokens):
            square = (frame_distance * (f - g)) ** 2 + (r - s) ** 2 + (c - d) ** 2
            seen[i, j] = square < radius**2
    return seen


@pytest.mark.parametrize("frame_distance", [1.0, 2.5])
@pytest.mark.parametrize("radius", [0.5, 1.0, 1.001, 2.0, 5.0, 6.4, 99.0])
@pytest.mark.parametrize("grid", [(1, 9, 13), (3, 5, 7), (4, 1, 17), (5, 8, 2)])
def test_a_tile_reads_the_union_of_its_discs(
    grid: tuple[int, int, int], radius: float, frame_distance: float
) -> None:
    plan = plan_of(Clear(radius=radius, frame_distance=frame_distance, tile=8), grid)
    each = disc(grid, radius, frame_distance)
    got = plan.weights()[0, 0] > 0
    for members in plan.query_index[0, 0].tolist():
        of_tile = [i for i in members if i >= 0]
        assert torch.equal(got[of_tile], each[of_tile].any(0).expand(len(of_tile), -1))


def test_the_radius_is_strict() -> None:
    """Tiles of one query show each disc: (0, 5) and (3, 4) are at a distance of exactly 5."""
    got = plan_of(Clear(radius=5, tile=1), (1, 11, 11)).weights()[0, 0, 5 * 11 + 5] > 0
    got = got.view(11, 11)
    assert not got[5, 10]
    assert not got[8, 9]
    assert got[5, 9]
    assert got[8, 8]
    assert torch.equal(got, disc((1, 11, 11), 5, 1.0)[5 * 11 + 5].view(11, 11))


def test_boxes_make_the_union_tight() -> None:
    """Tiles of two rows of queries would read 16 rows, 1,024 keys; boxes of 8 x 16 do not."""
    plan = plan_of(Clear(radius=8), (1, 64, 64))
    assert plan.num_tiles == 32
    assert plan.keys.count.max() <= 22 * 30
    assert plan.density < 0.13


@pytest.mark.parametrize("grid", [(1, 48, 52), (13, 16, 20), (2, 30, 41)])
def test_the_nearest_radius_is_taken(grid: tuple[int, int, int]) -> None:
    """Whatever density can be had, it is had where it is the nearest."""
    asked = [d / 40 for d in range(4, 28)]
    found = [plan_of(gs.get_method("clear", density=d), grid).density for d in asked]
    for density, got in zip(asked, found, strict=True):
        assert abs(got - density) <= min(abs(other - density) for other in found) + 1e-12


def test_densities_are_monotone_on_a_grid() -> None:
    found = [plan_of(Clear(density=d / 20), (5, 12, 17)).density for d in range(1, 21)]
    assert found == sorted(found)
    assert found[-1] == 1.0


@pytest.mark.parametrize("text", [(0, 3), (31, 148), (180, 181)])
def test_text_has_any_length_and_stands_anywhere(text: tuple[int, int]) -> None:
    grid = (1, 12, 15)
    got = plan_of(Clear(radius=3, tile=16), grid, text).weights()[0, 0] > 0
    alone = plan_of(Clear(radius=3, tile=16), grid).weights()[0, 0] > 0
    latent = torch.tensor([i for i in range(len(got)) if not text[0] <= i < text[1]])
    assert torch.equal(got[latent][:, latent], alone)
    assert got[slice(*text)].all()
    assert got[:, slice(*text)].all()


def test_two_grids_share_nothing() -> None:
    """Grids of equally many tokens, one behind the other: each has its own pattern."""
    first = plan_of(Clear(radius=3, tile=8), (1, 8, 18)).weights()
    other = plan_of(Clear(radius=3, tile=8), (1, 18, 8)).weights()
    again = plan_of(Clear(radius=3, tile=8), (1, 8, 18)).weights()
    assert not torch.equal(first, other)
    assert torch.equal(first, again)


def test_everything_is_dense() -> None:
    q, k, v = Shape(2, 2, 2, 240, 240, 16, 1).tensors()
    for method in (Clear(density=1.0), Clear(radius=1e3)):
        plan = method.plan(q, k, v, gs.Call(grid=(4, 6, 10)))
        assert plan.density == 1.0
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_padding_on_a_grid_keeps_rows_apart() -> None:
    """Each batch row gets its own radius, whatever the others hold."""
    q, k, v = Shape(2, 2, 1, 360, 360, 16, 1).tensors()
    valid = torch.arange(360) < torch.tensor([[360], [190]])
    k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    method = Clear(density=0.3, tile=32)
    whole = method.plan(q, k, v, gs.Call(grid=(2, 12, 15), key_valid=valid))
    whole.validate()
    for b in range(2):
        call = gs.Call(grid=(2, 12, 15), key_valid=valid[b : b + 1])
        part = method.plan(q[b : b + 1], k[b : b + 1], v[b : b + 1], call)
        assert torch.equal(part.weights()[0], whole.weights()[b])
    assert whole.keys.count[0].sum() > whole.keys.count[1].sum() / 2


@pytest.mark.parametrize(("num_queries", "num_keys"), [(40, 90), (90, 40), (1, 1)])
def test_a_sequence_without_a_grid(num_queries: int, num_keys: int) -> None:
    q, k, v = Shape(1, 1, 1, num_queries, num_keys, 8, 1).tensors()
    plan = Clear(radius=4, tile=1).plan(q, k, v)
    plan.validate()
    for i in range(num_queries):
        p = max(i + num_keys - num_queries, 0)
        want = [abs(p - j) < 4 for j in range(num_keys)]
        assert (plan.weights()[0, 0, i] > 0).tolist() == want


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"radius": 0}, "radius=0"),
        ({"radius": float("inf")}, "radius=inf"),
        ({"radius": 3.0, "density": 0.2}, "give one of radius, density"),
        ({"frame_distance": -1.0}, "frame_distance=-1.0"),
        ({"density": 0.0}, "density=0.0"),
        ({"tile": True}, "tile=True"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        Clear(**params)  # pyright: ignore[reportArgumentType]


def test_the_default_is_published() -> None:
    assert Clear().radius == 16
    assert Clear().static_key(gs.Call()) == Clear(radius=16.0).static_key(gs.Call(layer=3))
