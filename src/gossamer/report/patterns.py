"""What `gossamer methods NAME --draw` shows: the plans of a method on small seeded examples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.plans import coarse_mask
from gossamer.methods.intra import Intra
from gossamer.plan.rows import tile_queries, tile_rows
from gossamer.report.drawing import MAX_PIXELS, Panel, Pixels
from gossamer.report.palette import SERIES

Grid = tuple[int, int, int]

EXAMPLE_GRID: Grid = (4, 16, 16)
EXAMPLE_DENSITY = 0.25
_MASK_CELLS = 128  # a side of a drawn mask, at most
_PALE = 0.4  # how strongly keys are coloured; the queries that share them are full
_EMPTY = (233, 236, 241)
_PAPER = (255, 255, 255)
_FRAME_GAP = 8  # pixels between frames
_COLOURS = [tuple(int(each.light[i : i + 2], 16) for i in (1, 3, 5)) for each in SERIES]


def method_panels(name: str) -> list[Panel]:
    """Draw a method's plans.

    Args:
        name: A registered method's.

    Raises:
        GossamerError: The method cannot plan the example.
    """
    return intra_panels() if name == Intra.name else example_panels(name)


def example_panels(name: str) -> list[Panel]:
    """Draw what any method does with four frames of 16 × 16 tokens, at a quarter of the pairs.

    Dense attention reads them all.

    Queries and keys are seeded: content that changes smoothly over the grid, and some noise.
    """
    density = None if name == gs.Dense.name else EXAMPLE_DENSITY
    method = gs.get_method(name, density=density)
    q, k, v = example_tensors(EXAMPLE_GRID)
    call = gs.Call(grid=EXAMPLE_GRID)
    plan = method.plan(q, k, v, call)
    tokens = q.shape[2]
    panels = [
        Panel(
            title=f"Pairs read, head {head}",
            note=f"Rows are the {tokens} queries, columns the keys, in raster order.",
            pixels=mask_pixels(plan, head=head),
            density=plan.density,
        )
        for head in range(q.shape[1])
    ]
    query = tokens // 2 + EXAMPLE_GRID[2] * EXAMPLE_GRID[1] // 2 + EXAMPLE_GRID[2] // 2
    panels.append(
        Panel(
            title="Keys of one query, head 0",
            note="Four frames. Pale: keys read; full: the queries that share the list.",
            pixels=grid_pixels(plan, EXAMPLE_GRID, [query]),
            density=plan.density,
        )
    )
    if not method.causal_reason:
        causal = method.plan(q, k, v, gs.Call(causal=True))
        panels.append(
            Panel(
                title="Causal, head 0",
                note="The same tokens as one sequence; keys behind a query are not seen.",
                pixels=mask_pixels(causal),
                density=causal.density,
            )
        )
    return panels


def example_tensors(grid: Grid, *, heads: int = 2, dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return seeded q, k and v [1, heads, N, dim] whose content varies smoothly over the grid."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    axes = [torch.linspace(0, 1, size, device="cpu") for size in grid]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(1, -1, 3)  # [1, N, 3]
    wave = (place @ draw(heads, 3, dim) * 4 + draw(heads, 1, dim)).sin() * 2  # [heads, N, dim]
    q, k, v = (wave + 0.5 * draw(heads, place.shape[1], dim) for _ in range(3))
    return q[None], k[None], v[None]


def intra_panels() -> list[Panel]:
    """Draw every pattern of INTRA: Scatter, Gather, text, causal, and the layers of g2s4."""
    scatter, gather = Intra(schedule="scatter"), Intra(schedule="gather")
    segment, cyclic = (
        Intra(schedule="gather", gather=form, groups=4) for form in ("segment", "cyclic")
    )
    wide = Intra(schedule="gather", query_patch=(2, 4, 8), window=(4, 8, 16))
    language = Intra(schedule="g2s4")
    causal, window = gs.Call(causal=True), gs.Call(causal=True, layer=1)
    text = gs.Call(grid=(1, 8, 8), text=(0, 16))
    image = _Example(scatter, grid=(1, 16, 16), patch=(1, 2, 4))
    video = _Example(scatter, grid=(4, 8, 8), patch=(2, 2, 2))
    windows = _Example(gather, grid=(1, 32, 32), patch=(1, 8, 8))
    cubes = _Example(wide, grid=(8, 16, 32), patch=(2, 4, 8))
    return [
        _mask("Scatter 1-D", "8 groups: every 8th token, a colour each.", scatter, 64),
        image.panel(
            "Scatter 2-D",
            "8 groups: the place in a patch of 2x4 tokens. Every colour reads itself.",
            image.tokens_of_first_patch(),
        ),
        video.panel(
            "Scatter 3-D",
            "The same with patches of 2x2x2, over four frames.",
            video.tokens_of_first_patch(),
        ),
        _mask(
            "Scatter with text",
            "16 text tokens, then 8x8 of an image. All read the text; its queries also a group.",
            scatter,
            80,
            text,
        ),
        windows.panel(
            "Gather 0",
            "Patches of 8x8 queries (full) and their windows of 16x16 keys (pale).",
            [8 * 32 + 8, 16 * 32 + 24, 31 * 32],
        ),
        cubes.panel(
            "Gather 0, video",
            "Eight frames: a patch of 2x4x8 in a window of 4x8x16.",
            [4 * 512 + 8 * 32 + 16],
        ),
        _mask("Gather 1, segment", "4 groups: segments of 4, dealt in turn.", segment, 64),
        _mask("Gather 1, cyclic", "4 groups: token r of neighbourhood t in t + r.", cyclic, 64),
        _mask("Scatter, causal", "By absolute position, cut at the query's.", scatter, 64, causal),
        _mask("Gather 1, causal", "Segments, cut at the query's position.", segment, 64, causal),
        _mask(
            "g2s4, global layer",
            "2048 tokens: every other block of 256, the query's own included.",
            language,
            2048,
            causal,
        ),
        _mask(
            "g2s4, window layer",
            "2048 tokens: the 575 before a query, and the first 64.",
            language,
            2048,
            window,
        ),
    ]


def _mask(
    title: str, note: str, method: gs.Method, num_tokens: int, call: gs.Call | None = None
) -> Panel:
    """Draw which pairs a method reads whose plan depends on shapes alone."""
    x = torch.zeros(1, 1, num_tokens, 8, device="cpu")
    plan = method.plan(x, x, x, call)
    pixels = mask_pixels(plan, by_row=True)
    return Panel(title=title, note=note, pixels=pixels, density=plan.density)


@dataclass(frozen=True)
class _Example:
    """A method whose plan depends on shapes alone, on a grid; `patch` says where lines go."""

    method: gs.Method
    grid: Grid
    patch: Grid

    def tokens_of_first_patch(self) -> list[int]:
        """Return the tokens of the first patch: one of each Scatter group."""
        token = torch.arange(math.prod(self.grid), device="cpu").view(self.grid)
        frames, rows, columns = self.patch
        return token[:frames, :rows, :columns].flatten().tolist()

    def panel(self, title: str, note: str, queries: Iterable[int]) -> Panel:
        """Draw what some queries read."""
        x = torch.zeros(1, 1, math.prod(self.grid), 8, device="cpu")
        plan = self.method.plan(x, x, x, gs.Call(grid=self.grid))
        pixels = grid_pixels(plan, self.grid, queries, patch=self.patch)
        return Panel(title=title, note=note, pixels=pixels, density=plan.density)


def query_rows(plan: gs.SparsePlan, head: int = 0) -> Tensor:
    """Return the key row that each query of the first batch row reads, [N] int64."""
    queries, rows = tile_queries(plan)[0], tile_rows(plan)[0]
    queries, rows = (x[head if x.shape[0] > 1 else 0] for x in (queries, rows))
    slot = torch.where(queries < 0, plan.num_queries, queries).flatten()
    of_query = torch.zeros(plan.num_queries + 1, dtype=torch.int64)
    return of_query.scatter_(0, slot, rows.repeat_interleave(plan.tile))[: plan.num_queries]


def mask_pixels(plan: gs.SparsePlan, *, head: int = 0, by_row: bool = False) -> Pixels:
    """Draw which pairs a plan reads: queries down, keys to the right.

    A cell of several pairs is the stronger, the larger the share of them that is read; full where
    it is largest.

    Args:
        plan: A plan of at most a few thousand tokens.
        head: The head.
        by_row: Give queries that share a row of keys one colour, where there are enough colours.
    """
    weights = plan.weights()[0]
    weights = weights[head if weights.shape[0] > 1 else 0, :, : plan.num_keys]  # [N, S]
    rows = query_rows(plan, head)
    num_colours = plan.keys.num_rows if by_row and plan.keys.num_rows <= len(_COLOURS) else 1
    layers = [
        coarse_mask(weights * (rows % num_colours == each)[:, None], _MASK_CELLS)
        for each in range(num_colours)
    ]
    shares = torch.stack(layers).numpy()  # [colours, cells, cells]
    shares = shares / (shares.sum(0).max() or 1)
    away = np.array(_PAPER) - np.array(_COLOURS[:num_colours])  # [colours, 3]
    cells = np.array(_PAPER) - np.einsum("crk,cd->rkd", shares, away)
    return _enlarged(cells, MAX_PIXELS // max(cells.shape[:2]))


def grid_pixels(
    plan: gs.SparsePlan, grid: Grid, queries: Iterable[int], *, patch: Grid | None = None
) -> Pixels:
    """Draw, for some queries of head 0, the keys that they read, frame by frame.

    Args:
        plan: A plan of at most a few thousand tokens on the grid, without text.
        grid: (frames, rows, columns).
        queries: Token indices; each has a colour of its own. Keys read are pale, the queries that
            share the query's row of keys full.
        patch: (frames, rows, columns) between whose repetitions lines are drawn.
    """
    weights = plan.weights()[0, 0, :, : plan.num_keys]
    rows = query_rows(plan)
    cells = np.full((math.prod(grid), 3), _EMPTY, np.float64)
    for number, query in enumerate(queries):
        colour = np.array(_COLOURS[number % len(_COLOURS)])
        read = (weights[query] > 0).numpy()
        cells[read] += _PALE * (colour - cells[read])
        cells[(rows == rows[query]).numpy()] = colour
    return _mosaic(cells.reshape(*grid, 3), patch)


def _mosaic(frames: npt.NDArray[np.float64], patch: Grid | None) -> Pixels:
    """Put frames [F, H, W, 3] side by side and below one another, about as a square."""
    count, height, width = frames.shape[:3]
    shapes = [(-(-count // across), across) for across in range(1, count + 1)]
    down, across = min(shapes, key=lambda shape: max(shape[0] * height, shape[1] * width))
    sides = (down * height, down), (across * width, across)
    scale = min((MAX_PIXELS - _FRAME_GAP * (n - 1)) // cells for cells, n in sides)
    high, wide = height * scale + _FRAME_GAP, width * scale + _FRAME_GAP
    canvas = np.full((down * high, across * wide, 3), _PAPER, np.uint8)
    for number, frame in enumerate(frames):
        top, left = number // across * high, number % across * wide
        pixels = _enlarged(frame, scale)
        _rule(pixels, scale, 1 if scale > 4 else 0, (1, 1))
        if patch is not None:
            _rule(pixels, scale, 3, patch[1:])
        canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas[: down * high - _FRAME_GAP, : across * wide - _FRAME_GAP]


def _rule(pixels: Pixels, scale: int, width: int, every: tuple[int, int]) -> None:
    """Draw lines of the paper's colour around every so many rows and columns of cells."""
    for axis, cells in enumerate(every):
        lines = pixels if axis == 0 else pixels.swapaxes(0, 1)
        for at in range(cells * scale, lines.shape[0], cells * scale):
            lines[at - width // 2 - width % 2 : at + width // 2] = _PAPER


def _enlarged(cells: npt.NDArray[np.float64], scale: int) -> Pixels:
    """Return cells [rows, columns, 3] of 0…255 as squares of pixels."""
    pixels = np.rint(np.clip(cells, 0, 255)).astype(np.uint8)
    return pixels.repeat(scale, axis=0).repeat(scale, axis=1)
