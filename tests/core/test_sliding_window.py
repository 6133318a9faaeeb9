"""Sliding windows against their definitions, query by query."""

import itertools

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods.sliding_window import SlidingWindow
from gossamer.testing import assert_matches, attention, tolerance


def read_by(plan: gs.SparsePlan) -> torch.Tensor:
    """Return which keys each query reads, [N, S] bool, of the first batch row and head."""
    return plan.weights()[0, 0] > 0


def plan_of(method: gs.Method, num_queries: int, num_keys: int, **call: object) -> gs.SparsePlan:
    q, k, v = Shape(1, 2, 1, num_queries, num_keys, 8, 1).tensors()
    plan = method.plan(q, k, v, gs.Call(**call))
    plan.validate()
    return plan


def window(num_queries: int, num_keys: int, size: int, sink: int, *, causal: bool) -> torch.Tensor:
    """Return the definition of a 1-D window, [N, S]."""
    seen = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for i in range(num_queries):
        p = i + num_keys - num_queries
        first, last = (p - size + 1, p) if causal else (p - size // 2, p + (size - 1) // 2)
        for j in range(num_keys):
            hidden = causal and j > p
            seen[i, j] = (first <= j <= last or j < sink) and not hidden
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "sink"), [(1, 0), (2, 0), (8, 3), (33, 0), (64, 40), (999, 0)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (75, 75), (130, 130), (20, 90)])
def test_windows_are_exact_for_every_query(
    num_queries: int, num_keys: int, size: int, sink: int, causal: bool
) -> None:
    method = SlidingWindow(window=size, sink=sink, block=8, tile=16)
    got = read_by(plan_of(method, num_queries, num_keys, causal=causal))
    assert torch.equal(got, window(num_queries, num_keys, size, sink, causal=causal))


def test_a_causal_plan_lists_no_block_that_its_window_hides() -> None:
    """Work is what the window needs: a sink block, and the blocks that a tile's windows touch."""
    plan = plan_of(SlidingWindow(window=100, sink=4), 2048, 2048, causal=True)
    assert plan.keys.count.max() == 3
    assert plan.window == (99, 0, 4)


def test_windows_move_to_the_keys_where_queries_stand_in_front_of_them() -> None:
    plan = plan_of(SlidingWindow(window=4, tile=4), 12, 5)
    got = read_by(plan)
    assert torch.equal(got[:4].any(0), torch.tensor([True, True, False, False, False]))
    assert torch.equal(got[8:].any(0), torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("text", [(0, 7), (40, 51), (90, 101)])
def test_with_text_a_tile_reads_the_union_of_its_windows(text: tuple[int, int]) -> None:
    length = text[1] - text[0]
    total = 90 + length
    method = SlidingWindow(window=9, sink=2, tile=16)
    plan = plan_of(method, total, total, text=text)
    assert plan.window is None
    got = read_by(plan)
    latent = torch.tensor([i for i in range(total) if not text[0] <= i < text[1]])
    each = window(90, 90, 9, 2, causal=False)
    want = each.clone()
    for start in range(0, 90, 16):
        want[start : start + 16] = each[start : start + 16].any(0)
    assert torch.equal(got[latent][:, latent], want)
    assert got[slice(*text)].all()
    assert got[:, slice(*text)].all()


@pytest.mark.parametrize("sink", [{}, {"sink": 5}, {"sink_frames": 1}, {"sink_frames": 99}])
@pytest.mark.parametrize("sides", [(1, 1, 1), (1, 3, 5), (2, 2, 4), (3, 5, 3), (9, 9, 99)])
@pytest.mark.parametrize("grid", [(4, 5, 6), (1, 7, 9), (3, 1, 11)])
def test_windows_on_a_grid_are_shifted_at_its_borders(
    grid: tuple[int, int, int], sides: tuple[int, int, int], sink: dict[str, int]
) -> None:
    frames, rows, columns = grid
    num_tokens = frames * rows * columns
    plan = plan_of(SlidingWindow(window3d=sides, tile=8, **sink), num_tokens, num_tokens, grid=grid)
    number = sink.get("sink", sink.get("sink_frames", 0) * rows * columns)
    each = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    tokens = list(itertools.product(range(frames), range(rows), range(columns)))
    for i, token in enumerate(tokens):
        size = [min(side, extent) for side, extent in zip(sides, grid, strict=True)]
        start = [
            min(max(x - side // 2, 0), extent - side)
            for x, side, extent in zip(token, size, grid, strict=True)
        ]
        for j, key in enumerate(tokens):
            each[i, j] = all(
                low <= x < low + side for x, low, side in zip(key, start, size, strict=True)
            )
        assert each[i].sum() == size[0] * size[1] * size[2]  # shifted, not cut off
        each[i, :number] = True
    got = read_by(plan)
    for members in plan.query_index[0, 0].tolist():
        of_tile = [i for i in members if i >= 0]
        assert torch.equal(got[of_tile], each[of_tile].any(0).expand(len(of_tile), -1))


def test_queries_of_a_grid_are_grouped_so_that_their_union_is_small() -> None:
    """A tile of consecutive queries would read two whole rows of windows."""
    grid = (4, 32, 32)
    plan = plan_of(SlidingWindow(window3d=(1, 9, 9)), 4096, 4096, grid=grid)
    assert plan.keys.count.max() <= 24 * 16
    assert plan.num_tiles == 32


@pytest.mark.parametrize("density", [0.1, 0.3, 0.6])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal"),
    [(2048, 2048, False), (4097, 4097, False), (4097, 4097, True), (1500, 4097, True)],
)
def test_the_asked_density_is_met(
    density: float, num_queries: int, num_keys: int, causal: bool
) -> None:
    plan = plan_of(SlidingWindow(density=density), num_queries, num_keys, causal=causal)
    assert abs(plan.density - density) <= 0.02


def test_a_density_makes_a_band() -> None:
    """Only blocks of one distance, the outermost, are kept in part."""
    mask = plan_of(SlidingWindow(density=0.3), 4096, 4096).keys.to_mask(4096)[0, 0]
    row, column = torch.arange(32)[:, None], torch.arange(32)
    apart = (row - column).abs()
    partly = [d for d in range(32) if mask[apart == d].any() and not mask[apart == d].all()]
    assert len(partly) <= 1
    assert not mask[apart > max(d for d in range(32) if mask[apart == d].any())].any()


def test_a_density_with_sinks_keeps_them() -> None:
    got = read_by(plan_of(SlidingWindow(density=0.3, sink=130), 4096, 4096, causal=True))
    seen = torch.ones(4096, 130, dtype=torch.bool).tril()
    assert torch.equal(got[:, :130], seen)


@pytest.mark.parametrize("density", [0.05, 0.3, 0.7])
def test_a_box_is_scaled_to_the_density(density: float) -> None:
    """The nearest there is: no window one step larger or smaller comes nearer."""
    grid = (13, 16, 20)
    plan = plan_of(SlidingWindow(density=density, window3d=(1, 2, 2)), 4160, 4160, grid=grid)
    others = [
        plan_of(SlidingWindow(window3d=sides), 4160, 4160, grid=grid).density
        for sides in {
            tuple(max(1, round(x / 40 * side)) for side in (1, 2, 2)) for x in range(8, 560, 8)
        }
    ]
    best = min(abs(other - density) for other in others)
    assert abs(plan.density - density) <= best + 1e-12


@pytest.mark.parametrize(
    "method",
    [
        SlidingWindow(density=1.0),
        SlidingWindow(density=1.0, window3d=(1, 2, 3)),
        SlidingWindow(window=10**6),
        SlidingWindow(window3d=(99, 99, 99)),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [None, (0, 17)])
def test_everything_is_dense(method: gs.Method, text: tuple[int, int] | None) -> None:
    total = 240 + (17 if text else 0)
    q, k, v = Shape(2, 2, 2, total, total, 16, 1).tensors()
    plan = method.plan(q, k, v, gs.Call(grid=(4, 6, 10), text=text))
    plan.validate()
    assert plan.density == 1.0
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


@pytest.mark.parametrize("text", [None, (0, 9)])
@pytest.mark.parametrize(
    "method", [SlidingWindow(window=20, sink=3), SlidingWindow(window3d=(1, 1, 30))], ids=str
)
def test_padding_changes_nothing(method: gs.Method, text: tuple[int, int] | None) -> None:
    q, k, v = Shape(2, 2, 2, 200, 200, 16, 3).tensors()
    alone = gs.sparse_attention(q, k, v, method, gs.Call(text=text))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 33), value=torch.nan) for x in (q, k, v)]
    valid = torch.arange(233)[None] < 200
    out = gs.sparse_attention(*padded, method, gs.Call(text=text, key_valid=valid))
    torch.testing.assert_close(out[:, :, :200], alone, rtol=1e-4, atol=1e-5)


def test_a_window_of_padding_alone_reads_what_there_is() -> None:
    q, k, v = Shape(1, 1, 1, 30, 60, 8, 3).tensors()
    valid = (torch.arange(60) < 20)[None]
    plan = SlidingWindow(window3d=(1, 1, 5), tile=8).plan(q, k, v, gs.Call(key_valid=valid))
    plan.validate()


def test_sizes_alone_decide() -> None:
    """So the plan is kept for the whole generation; another grid or span makes another."""
    method = SlidingWindow(window3d=(1, 3, 3))
    key = method.static_key(gs.Call())
    assert key is not None
    assert hash(key) == hash(SlidingWindow(window3d=[1, 3, 3]).static_key(gs.Call(step=3)))  # pyright: ignore[reportArgumentType]
    plan = plan_of(method, 120, 120, grid=(4, 5, 6))
    assert (plan.batch, plan.heads) == (1, 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 5, "density": 0.2}, "give one of"),
        ({"window": 5, "window3d": (1, 2, 3)}, "give one of"),
        ({"window3d": (1, 2)}, "frames, rows, columns"),
        ({"window3d": (1, 0, 2)}, "window3d=0"),
        ({"sink": -1}, "sink=-1"),
        ({"sink_frames": 1.5}, "sink_frames=1.5"),
        ({"density": 1.5}, "density=1.5"),
        ({"tile": 0}, "tile=0"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        SlidingWindow(**params)  # pyright: ignore[reportArgumentType]


def test_what_has_no_meaning_is_refused() -> None:
    q, k, v = Shape(1, 1, 1, 60, 60, 8, 3).tensors()
    with pytest.raises(gs.PlanError, match=r"sink_frames=1 needs call\.grid"):
        SlidingWindow(sink_frames=1).plan(q, k, v)
    with pytest.raises(gs.UnsupportedError, match="window3d"):
        SlidingWindow(window3d=(1, 1, 3)).plan(q, k, v, gs.Call(causal=True))
    with pytest.raises(gs.UnsupportedError, match="text and causality"):
        SlidingWindow(window=3).plan(q, k, v, gs.Call(causal=True, text=(0, 4)))
