"""SVG: both bands against their definition, and the choice between them."""

import itertools
import math

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods.svg import SVG
from gossamer.testing import assert_matches, attention, tolerance

Grid = tuple[int, int, int]


def structured(grid: Grid, kinds: str, *, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """Return q, k and v whose head h attends within a frame ("s") or within a place ("t")."""
    frames, places = grid[0], grid[1] * grid[2]
    frame = torch.arange(frames * places) // places
    place = torch.arange(frames * places) % places
    g = torch.Generator().manual_seed(7)
    codes = {
        "s": torch.nn.functional.normalize(torch.randn(frames, 24, generator=g), dim=1)[frame],
        "t": torch.nn.functional.normalize(torch.randn(places, 24, generator=g), dim=1)[place],
    }
    q = torch.stack([codes[kind] for kind in kinds]).expand(batch, -1, -1, -1) * 12
    v = torch.randn(q.shape, generator=g)
    return q, q.clone(), v


def is_temporal(plan: gs.SparsePlan) -> list[bool]:
    """Return whether each head of the first batch row reads permuted keys."""
    if plan.keys.key_order is None:
        return [False]
    order = plan.keys.key_order[0, :, : plan.num_keys]
    return [not torch.equal(row, torch.arange(plan.num_keys).int()) for row in order]


def band(
    grid: Grid, tile: int, block: int, density: float, *, temporal: bool
) -> list[torch.Tensor]:
    """Return the bands that may stand for a density: [N, N] each, by the definition.

    A pair of a tile and a block is read up to a distance; of the pairs at the last one any may be
    left out. The least and the greatest mask are returned.
    """
    frames, places = grid[0], grid[1] * grid[2]
    num_tokens = frames * places
    position = [
        (p * frames + f) if temporal else (f * places + p)
        for f, p in itertools.product(range(frames), range(places))
    ]
    rows, columns = -(-num_tokens // tile), -(-num_tokens // block)
    distance = torch.zeros(num_tokens, num_tokens)
    for i in range(num_tokens):
        for j in range(num_tokens):
            r, c = position[i] // tile, position[j] // block
            distance[i, j] = abs((r + 0.5) * tile - (c + 0.5) * block)
    steps = distance.unique()
    share = [(distance <= step).double().mean().item() for step in steps]
    assert rows * columns >= len(steps)
    last = next(i for i, s in enumerate(share) if s >= density - 1e-9)
    return [distance < steps[last], distance <= steps[last]]


@pytest.mark.parametrize("density", [0.15, 0.4, 0.7])
@pytest.mark.parametrize(
    ("grid", "tile", "block"), [((4, 6, 8), 16, 16), ((5, 3, 7), 8, 16), ((6, 4, 9), 16, 8)]
)
def test_each_head_reads_its_band(grid: Grid, tile: int, block: int, density: float) -> None:
    q, k, v = structured(grid, "st")
    method = SVG(density=density, tile=tile, block=block)
    plan = method.plan(q, k, v, gs.Call(grid=grid))
    plan.validate()
    assert is_temporal(plan) == [False, True]
    for head, temporal in enumerate((False, True)):
        got = plan.weights()[0, head] > 0
        least, greatest = band(grid, tile, block, density, temporal=temporal)
        # Each row of tiles keeps its nearest block also where the density does not pay for it.
        assert not (least & ~got).any()
        assert not (got & ~greatest).any()


@pytest.mark.parametrize("density", [0.1, 0.25, 0.5])
def test_the_half_width_is_the_published_one(density: float) -> None:
    """w = (1 - sqrt(1 - density)) N, to within a block."""
    num_tokens = 16384
    q = torch.zeros(1, 1, num_tokens, 4)
    plan = SVG(density=density).plan(q, q, q)
    mask = plan.keys.to_mask(num_tokens)[0, 0]
    row, column = torch.arange(len(mask))[:, None], torch.arange(len(mask))
    half_width = (1 - math.sqrt(1 - density)) * num_tokens
    apart = (row - column).abs() * 128
    assert mask[apart <= half_width - 128].all()
    assert not mask[apart >= half_width + 128].any()


@pytest.mark.parametrize("density", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("grid", [(13, 16, 20), (16, 8, 16), (33, 8, 9)])
@pytest.mark.parametrize("sink_frames", [0, 1])
def test_the_parameter_is_the_density_kept(grid: Grid, density: float, sink_frames: int) -> None:
    """Not a share that is dropped, whatever other code calls it; sinks are inside it."""
    q, k, v = structured(grid, "stts")
    plan = SVG(density=density, sink_frames=sink_frames).plan(q, k, v, gs.Call(grid=grid))
    plan.validate()
    assert abs(plan.density - density) <= 0.02  # of all heads, which read equally many blocks
    assert sink_frames or is_temporal(plan) == [False, True, True, False]


def test_densities_are_monotone_on_a_grid() -> None:
    grid = (13, 8, 10)
    q, k, v = structured(grid, "stts")
    found = [SVG(density=d / 20).plan(q, k, v, gs.Call(grid=grid)).density for d in range(1, 21)]
    assert found == sorted(found)
    assert found[-1] == 1.0


@pytest.mark.parametrize("pad", [0, 45])
@pytest.mark.parametrize("sink_frames", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_the_band_that_is_read_is_the_one_that_was_tried(
    seed: int, sink_frames: int, pad: int
) -> None:
    """With every query sampled equally often, the choice is that of the whole output's error.

    The public code tries a band of fixed width and then reads another.
    """
    samples = 3120 if pad else 240  # 13 * 240 = 16 * 195
    grid = (5, 6, 8)
    q, k, v = Shape(2, 2, 2, 240, 240, 16, seed).tensors()
    valid = torch.arange(240) < torch.tensor([[240], [240 - pad]])
    q, k, v = (x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (q, k, v))
    call = gs.Call(grid=grid, key_valid=valid)
    method = SVG(density=0.3, tile=16, block=16, samples=samples, sink_frames=sink_frames)
    plan = method.plan(q, k, v, call)
    got = torch.stack(
        [row[:240].ne(torch.arange(240)).any() for row in plan.keys.key_order.flatten(0, 1)]
    ).view(2, 4)

    losses = []
    for temporal in (False, True):
        # A plan of the same band for all heads: planned from inputs that only one band suits.
        shape = structured(grid, ("t" if temporal else "s") * 4, batch=2)
        of_band = method.plan(*shape, call)
        seen = (of_band.weights() > 0) & valid[:, None, None]
        clean = [x.nan_to_num(0.0) for x in (q, k, v)]
        full = attention(*clean, valid[:, None, None].expand(-1, -1, 240, -1)).out
        loss = (attention(*clean, seen).out - full).square()
        # Padded queries are not tried.
        losses.append((loss * valid[:, None, :, None]).sum((-1, -2)))
    assert torch.equal(got, losses[1] < losses[0])


@pytest.mark.parametrize("decisive", ["first", "second"])
def test_samples_come_from_the_whole_sequence(decisive: str) -> None:
    """One half of the queries is spatial, the other, which loses more, temporal.

    The public code looks at the first 10,000 tokens, and fails on shorter sequences.
    """
    grid = (8, 12, 16)
    (q, k, v), (q2, k2, v2) = structured(grid, "s"), structured(grid, "t")
    is_first = torch.arange(8 * 12 * 16)[:, None] < 8 * 12 * 16 // 2
    is_decisive = is_first == (decisive == "first")
    queries = torch.cat([q.masked_fill(is_decisive, 0), q2.masked_fill(~is_decisive, 0)], dim=-1)
    values = torch.cat([v, 9 * v2], dim=-1)  # of the decisive half: the other reads no place
    keys = torch.cat([k, k2], dim=-1)
    plan = SVG(density=0.2).plan(queries, keys, values, gs.Call(grid=grid, scale=0.3))
    assert is_temporal(plan) == [True]


def test_a_short_sequence_has_fewer_queries_than_samples() -> None:
    q, k, v = structured((3, 2, 2), "st")
    plan = SVG(density=0.5, tile=2, block=2).plan(q, k, v, gs.Call(grid=(3, 2, 2)))
    plan.validate()


@pytest.mark.parametrize("grid", [(6, 5, 7), (4, 8, 8)])
def test_a_sink_frame_is_the_same_frame_in_both_orders(grid: Grid) -> None:
    """The public code keeps the first positions of the token-major order: all frames' corners."""
    per_frame = grid[1] * grid[2]
    q, k, v = structured(grid, "st")
    method = SVG(density=0.5, sink_frames=1, tile=8, block=8)
    plan = method.plan(q, k, v, gs.Call(grid=grid))
    assert is_temporal(plan) == [False, True]
    read = plan.weights()[0] > 0
    assert read[:, :, :per_frame].all()
    # The rest of the temporal head's density is still spent around the query's place.
    frame, place = (
        torch.arange(math.prod(grid)) // per_frame,
        torch.arange(math.prod(grid)) % per_frame,
    )
    same_place = (place[:, None] == place) & (frame > 0)
    assert read[1][same_place].double().mean() > 0.9


def test_heads_share_one_set_of_tensors() -> None:
    """So the choice is never waited for: shapes do not depend on it."""
    grid = (8, 6, 8)
    shapes = set()
    for kinds in ("ss", "st", "tt"):
        q, k, v = structured(grid, kinds)
        plan = SVG(density=0.3, tile=32, block=32).plan(q, k, v, gs.Call(grid=grid))
        assert plan.keys.index.shape[:2] == (1, 1)  # both orders read the same blocks
        shapes.add((plan.query_index.shape, plan.keys.key_order.shape, plan.keys.index.shape))
    assert len(shapes) == 1


def test_the_choice_is_keyed_by_the_global_head_not_the_batch_row() -> None:
    grid = (5, 6, 8)
    q, k, v = Shape(1, 4, 1, 240, 240, 16, 3).tensors()
    q, k, v = (x.repeat(2, 1, 1, 1) for x in (q, k, v))
    method = SVG(density=0.3, tile=16, block=16, samples=3)
    whole = method.plan(q, k, v, gs.Call(grid=grid, step=2)).weights()
    assert torch.equal(whole[0], whole[1])
    call = gs.Call(grid=grid, step=2, head_offset=2)
    part = method.plan(q[:1, 2:], k[:1, 2:], v[:1, 2:], call).weights()
    assert torch.equal(part[0], whole[0, 2:])
    chosen = {
        tuple(is_temporal(method.plan(q, k, v, gs.Call(grid=grid, step=step))))
        for step in range(12)
    }
    assert len(chosen) > 1  # three samples of noise: other steps draw others


@pytest.mark.parametrize("text", [(0, 33), (100, 133), (240, 273)])
def test_text_has_any_length_and_stands_anywhere(text: tuple[int, int]) -> None:
    grid = (5, 6, 8)
    q, k, v = structured(grid, "st")
    method = SVG(density=0.3, tile=16, block=16)
    alone = method.plan(q, k, v, gs.Call(grid=grid)).weights() > 0
    noise = torch.randn(1, 2, 33, 24, generator=torch.Generator().manual_seed(0))
    joint = [torch.cat([x[:, :, : text[0]], noise, x[:, :, text[0] :]], dim=2) for x in (q, k, v)]
    plan = method.plan(*joint, gs.Call(grid=grid, text=text))
    plan.validate()
    got = plan.weights() > 0
    latent = torch.tensor([i for i in range(273) if not text[0] <= i < text[1]])
    assert torch.equal(got[:, :, latent][..., latent], alone)
    assert got[:, :, slice(*text)].all()
    assert got[..., slice(*text)].all()


def test_everything_is_dense() -> None:
    q, k, v = Shape(2, 2, 2, 240, 240, 16, 1).tensors()
    plan = SVG(density=1.0).plan(q, k, v, gs.Call(grid=(5, 6, 8)))
    assert plan.density == 1.0
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_permuted_heads_attend_as_their_weights_say(kernel: str) -> None:
    grid = (5, 6, 8)
    q, k, v = structured(grid, "stst")
    k, v = k[:, :2], v[:, :2]  # grouped heads: 0 and 1 read KV head 0, 2 and 3 head 1
    plan = SVG(density=0.3, tile=16, block=16).plan(q, k, v, gs.Call(grid=grid))
    got = gs.attend(q, k, v, plan, kernel=kernel)
    assert_matches(got, attention(q, k, v, plan.weights()), tolerance(q, k, v))


@pytest.mark.parametrize("shape", [(100, 900), (900, 100), (1, 1), (300, 300)])
def test_a_sequence_without_a_grid_is_spatial(shape: tuple[int, int]) -> None:
    q, k, v = Shape(1, 2, 1, *shape, 8, 1).tensors()
    plan = SVG(density=0.2, tile=16, block=16).plan(q, k, v)
    plan.validate()
    assert plan.query_index is None
    assert plan.keys.key_order is None


def test_planning_in_half_precision_chooses_alike() -> None:
    grid = (8, 6, 8)
    q, k, v = (x.bfloat16() for x in structured(grid, "sttsst"))
    plan = SVG(density=0.3, tile=32, block=32).plan(q, k, v, gs.Call(grid=grid))
    assert is_temporal(plan) == [False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"density": 0.0}, "density=0.0"),
        ({"samples": 0}, "samples=0"),
        ({"sink_frames": -2}, "sink_frames=-2"),
        ({"block": 1.5}, "block=1.5"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        SVG(**params)  # pyright: ignore[reportArgumentType]


def test_the_plan_depends_on_the_tensors() -> None:
    assert SVG().static_key(gs.Call()) is None
