"""Radial against its definition, token by token, and against the published densities."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods.radial import Radial
from gossamer.testing import assert_matches, attention, tolerance


def plan_of(
    method: gs.Method, grid: tuple[int, int, int], text: tuple[int, int] | None = None
) -> gs.SparsePlan:
    total = grid[0] * grid[1] * grid[2] + (text[1] - text[0] if text else 0)
    q, k, v = Shape(1, 2, 1, total, total, 8, 1).tensors()
    return method.plan(q, k, v, gs.Call(grid=grid, text=text))


def mask_of(method: gs.Method, grid: tuple[int, int, int]) -> torch.Tensor:
    """Return the blocks that tiles read, [R, C] bool."""
    plan = plan_of(method, grid)
    return plan.keys.to_mask(plan.num_keys)[0, 0]


def tokens_read(num_tokens: int, per_frame: int, method: Radial) -> torch.Tensor:
    """Return the definition for pairs of tokens, [N, N]."""
    frame, place = torch.arange(num_tokens) // per_frame, torch.arange(num_tokens) % per_frame
    apart = (frame[:, None] - frame).abs()
    gap = (place[:, None] - place).abs()
    decay, block = method.decay or 0.0, method.block
    seen = (apart <= 1) | (frame < method.sink_frames)
    for distance in range(2, int(apart.max()) + 1):
        width = 2 ** per_frame.bit_length() / 2 ** distance.bit_length()
        divisor = 1
        while divisor < block / (width * max(1.0, decay)):
            divisor *= 2
        if distance % divisor == 0:
            seen |= (apart == distance) & (gap <= max(block, width * decay))
    return seen


def blocks_read(seen: torch.Tensor, tile: int, block: int) -> torch.Tensor:
    """Return the definition for pairs of tiles and blocks, [R, C]."""
    num_columns = -(-len(seen) // block)
    keep = []
    for part in seen.split(tile):
        count = part.sum(0)
        good = [(piece * 3 > len(part)).sum().item() for piece in count.split(block)]
        some = [(piece > 0).sum().item() for piece in count.split(block)]
        keep.append([some[c] > 0 and good[c] * 10 > some[c] * 6 for c in range(num_columns)])
    return torch.tensor(keep)


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.55, 0.95, 1.0, 1.5, 4.0, 100.0])
@pytest.mark.parametrize("sink_frames", [0, 1, 2])
@pytest.mark.parametrize(
    ("grid", "tile", "block"),
    [
        ((9, 4, 11), 8, 8),  # 44 tokens a frame: blocks straddle frames
        ((17, 3, 5), 8, 8),  # a divisor of 2 and more at the greater distances
        ((6, 5, 13), 16, 8),
        ((11, 2, 3), 16, 16),  # frames smaller than a block
        ((5, 1, 37), 4, 16),
        ((1, 7, 9), 8, 8),
    ],
)
def test_blocks_are_those_of_the_definition(
    grid: tuple[int, int, int], tile: int, block: int, sink_frames: int, decay: float
) -> None:
    method = Radial(decay=decay, sink_frames=sink_frames, tile=tile, block=block)
    seen = tokens_read(math.prod(grid), grid[1] * grid[2], method)
    want = blocks_read(seen, tile, block)
    nothing = ~want.any(1)
    got = mask_of(method, grid)
    assert torch.equal(got[~nothing], want[~nothing])
    assert got[nothing].sum(1).eq(1).all()  # a row of which the rule leaves nothing keeps a block


@pytest.mark.parametrize(
    ("grid", "decay", "sink_frames", "published"),
    [
        ((21, 45, 80), 0.2, 1, 0.265),
        ((21, 45, 80), 0.8, 1, 0.361),
        ((33, 45, 80), 0.95, 0, 0.272),
    ],
)
def test_published_densities(
    grid: tuple[int, int, int], decay: float, sink_frames: int, published: float
) -> None:
    """The published figures count the ragged last block as read by all and reading all."""
    mask = mask_of(Radial(decay=decay, sink_frames=sink_frames), grid)
    assert mask.shape[0] * 128 > math.prod(grid)
    mask[-1], mask[:, -1] = True, True
    # Half a unit of the figures' last digit, and the blocks that two frames share (docstring).
    assert abs(mask.double().mean().item() - published) <= 0.0005 + 0.0004


def test_the_ragged_tail_is_treated_like_the_rest() -> None:
    """Of 396 tokens the last 4 are neither left out, nor read by all, nor do they read all."""
    mask = mask_of(Radial(decay=0.0, sink_frames=0, block=8, tile=8), (9, 4, 11))
    assert mask[-1, -1]
    assert len(mask) / 4 < mask[:, -1].sum() < len(mask)
    assert len(mask) / 4 < mask[-1].sum() < len(mask)


def test_a_density_is_a_decay() -> None:
    """Asked for what a decay computes, the plan is that decay's, but for blocks at equal decays."""
    grid = (21, 45, 80)
    for decay in (0.2, 0.8):
        plan = plan_of(Radial(decay=decay), grid)
        again = plan_of(Radial(density=plan.density), grid)
        assert again.density == pytest.approx(plan.density, abs=1e-4)
        num_keys = plan.num_keys
        differ = plan.keys.to_mask(num_keys) ^ again.keys.to_mask(num_keys)
        assert differ.double().mean() < 2e-3


@pytest.mark.parametrize("grid", [(13, 16, 20), (21, 12, 17), (33, 6, 8), (1, 50, 60), (40, 9, 9)])
def test_densities_are_met_and_monotone_on_grids(grid: tuple[int, int, int]) -> None:
    """Also above what a decay of 1 reads and below what a decay of 0 does."""
    asked = [0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95, 1.0]
    found = [plan_of(gs.get_method("radial", density=d), grid).density for d in asked]
    assert found == sorted(found)
    assert found[-1] == 1.0
    assert all(abs(got - want) <= 0.02 for got, want in zip(found, asked, strict=True))


def test_a_low_density_keeps_the_nearest_of_the_pattern() -> None:
    grid = (13, 16, 20)
    least = mask_of(Radial(decay=0.0, sink_frames=0), grid)
    mask = mask_of(Radial(density=0.1, sink_frames=0), grid)
    assert not (mask & ~least).any()
    row, column = torch.arange(len(mask))[:, None], torch.arange(len(mask))
    apart = (row - column).abs()
    assert apart[mask].max() <= apart[least & ~mask].min()


def test_each_resolution_has_its_own_pattern() -> None:
    """Nothing is kept from one grid to another of equally many tokens."""
    masks = [mask_of(Radial(), grid) for grid in ((21, 8, 16), (42, 8, 8), (21, 8, 16))]
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("text", [(0, 77), (300, 412), (840, 841)])
def test_text_is_read_by_all_and_reads_all(text: tuple[int, int]) -> None:
    grid = (7, 10, 12)
    method = Radial(density=0.3, block=32, tile=32)
    plan = plan_of(method, grid, text)
    plan.validate()
    got = plan.weights()[0, 0] > 0
    latent = torch.tensor([i for i in range(len(got)) if not text[0] <= i < text[1]])
    assert torch.equal(got[latent][:, latent], plan_of(method, grid).weights()[0, 0] > 0)
    assert got[slice(*text)].all()
    assert got[:, slice(*text)].all()


def test_everything_is_dense() -> None:
    q, k, v = Shape(2, 2, 2, 520, 520, 16, 1).tensors()
    for method in (Radial(density=1.0), Radial(decay=1e6, block=16, tile=16)):
        plan = method.plan(q, k, v, gs.Call(grid=(13, 5, 8)))
        assert plan.density == 1.0
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_batch_rows_do_not_mix() -> None:
    q, k, v = Shape(2, 2, 1, 840, 840, 16, 1).tensors()
    valid = torch.arange(840) < torch.tensor([[840], [333]])
    k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    method = Radial(density=0.3, block=32, tile=32)
    whole = method.plan(q, k, v, gs.Call(grid=(7, 10, 12), key_valid=valid))
    whole.validate()
    for b in range(2):
        call = gs.Call(grid=(7, 10, 12), key_valid=valid[b : b + 1])
        part = method.plan(q[b : b + 1], k[b : b + 1], v[b : b + 1], call)
        assert torch.equal(part.weights()[0], whole.weights()[b])
    assert Radial(decay=0.2).plan(q, k, v, gs.Call(grid=(7, 10, 12))).batch == 1


@pytest.mark.parametrize(("num_queries", "num_keys"), [(100, 900), (900, 100), (1, 1)])
def test_a_sequence_without_a_grid(num_queries: int, num_keys: int) -> None:
    """Frames of a block each; the last query stands at the last key."""
    q, k, v = Shape(1, 1, 1, num_queries, num_keys, 8, 1).tensors()
    for method in (Radial(block=16, tile=16), Radial(density=0.2, block=16, tile=16)):
        plan = method.plan(q, k, v)
        plan.validate()
        if num_queries < num_keys:
            assert (plan.weights()[0, 0, -1, -16:] > 0).all()


def test_a_long_video_is_planned_without_its_square() -> None:
    """46,800 tokens: the mask of their pairs would be 2.2 GB."""
    code = """
        import resource, torch, gossamer as gs
        from gossamer.methods.radial import Radial
        torch.set_num_threads(1)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        q = torch.randn(1, 1, 46800, 8)
        Radial().plan(q[:, :, :600], q[:, :, :600], q[:, :, :600])
        before = peak()
        Radial(density=0.25).plan(q, q, q, gs.Call(grid=(13, 45, 80)))
        print(peak() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 300


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"decay": -0.1}, "decay=-0.1"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"decay": 0.2, "density": 0.2}, "give one of decay, density"),
        ({"density": 0}, "density=0"),
        ({"sink_frames": -1}, "sink_frames=-1"),
        ({"block": 0}, "block=0"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        Radial(**params)  # pyright: ignore[reportArgumentType]


def test_the_default_is_published() -> None:
    assert (Radial().decay, Radial().sink_frames) == (0.2, 1)
    assert Radial().static_key(gs.Call()) == Radial(decay=0.2).static_key(gs.Call(layer=3))
