"""CLEAR: every token reads those within a radius of it on the grid."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group.patches import Patches, line_tiles, patch_tiles
from gossamer.methods.base import Method, State
from gossamer.methods.geometric import runs_plan
from gossamer.methods.params import check_count, check_number, check_share, only_one
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan
from gossamer.select.runs import Runs

_RADIUS = 16.0  # the middle one of those published: 8, 16 and 32
_MARGIN = 16  # width of the discs for which queries are grouped where a density decides it


@register
@dataclass(frozen=True, kw_only=True)
class Clear(Method):
    """Read the keys at a Euclidean grid distance below a radius, whatever they hold.

    A query at (frame, row, column) reads the keys with

        sqrt((frame_distance * df)^2 + dr^2 + dc^2) < radius,

    strictly, as in the paper for images (df = 0); the form for video is this library's, with one
    frame counting as `frame_distance` columns. Queries are grouped into boxes of the grid, and a
    tile reads the union of its queries' discs (balls), so each query reads its disc and a margin of
    neighbours. A call without a grid is a sequence: df = dr = 0.

    The published models are fine-tuned to this pattern. Nothing is trained here, and untrained
    models lose quality with it at small radii. The paper's pooled keys and its logit scaling at
    high resolution belong to those models: neither is added.

    Differs from the public code: text may have any length and stand anywhere; the pattern is made
    for the grid of each call, so two resolutions do not share one; video has a form.

    Attributes:
        radius: Radius in columns; published are 8, 16 (the default) and 32.
        density: Share of the pairs to compute, by the radius that comes nearest, the tiles' margins
            counted; instead of `radius`. None: that decides.
        frame_distance: Distance of two consecutive frames in columns.

    Other parameters:
        tile: Queries per tile.
    """

    name: ClassVar[str] = "clear"
    fixed_density: ClassVar[bool] = True
    paper: ClassVar[str] = "CLEAR, arXiv 2412.16112"
    causal_reason: ClassVar[str] = "a disc around a query holds later positions of the image too"

    radius: float | None = None
    density: float | None = None
    frame_distance: float = 1.0
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse contradictory or wrong values; a radius of 16 where none is given."""
        if only_one(self.name, radius=self.radius, density=self.density) is None:
            object.__setattr__(self, "radius", _RADIUS)
        if self.density is not None:
            check_share(self.name, "density", self.density)
        check_number(self.name, "radius", self.radius, optional=True)
        check_number(self.name, "frame_distance", self.frame_distance)
        check_count(self.name, "tile", self.tile)

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with the radius that comes nearest to `density` at each call's size."""
        return cls(density=density, **params)

    def static_key(self, call: Call) -> Hashable:
        """Return the parameters: the plan depends on sizes alone."""
        del call
        return self

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Cut the queries into boxes and list the keys around each."""
        del v, state
        lengths = (q.shape[2], k.shape[2])
        tiles = line_tiles(*lengths, self.tile)
        if call.grid is not None:
            # Boxes that changed with the density would not let the density grow evenly.
            reach = _MARGIN if self.radius is None else round(2 * self.radius)
            margin = (round(reach / self.frame_distance), reach, reach)
            tiles = patch_tiles(call.grid, self.tile, margin)
        runs = _balls(tiles, self.frame_distance)
        radius = _RADIUS if self.radius is None else self.radius
        return runs_plan(tiles, runs, lengths, call, q.device, knob=radius, density=self.density)


def _balls(tiles: Patches, frame_distance: float) -> Runs:
    """Return the runs of columns, one for each row of each frame, within a radius of a box."""
    frames, rows, columns = tiles.grid
    line = torch.arange(frames * rows, device="cpu")
    place = torch.stack([line // rows, line % rows], dim=1)  # [L, 2]

    diagonal = ((frames * frame_distance) ** 2 + rows**2 + columns**2) ** 0.5

    def find(part: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        radius = radius.clamp(max=diagonal)  # a greater one reads no more, and its square overflows
        first, last = tiles.first[part], tiles.last[part]  # [n, 3]
        # The box's nearest token decides: along each axis, 0 inside the box.
        below = first[:, None, :2] - place
        gap = below.maximum(place - last[:, None, :2]).clamp(min=0).double()  # [n, L, 2]
        left = radius[:, None] ** 2 - (gap[..., 0] * frame_distance) ** 2 - gap[..., 1] ** 2
        # The greatest whole number strictly below the root; -1 where the line is out of reach.
        reach = left.clamp(min=0).sqrt().ceil().long() - 1
        begin = (first[:, None, 2] - reach).clamp(min=0)
        end = (last[:, None, 2] + reach + 1).clamp(max=columns)
        end = torch.where(reach < 0, begin, end)
        return line * columns + begin, line * columns + end

    # Below a radius of 1 a token reads itself alone.
    return Runs(tiles.num_tiles, len(line), 0.5, diagonal, find)
