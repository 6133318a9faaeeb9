"""A method of one's own: each frame reads the frames nearest in time.

A method is a frozen dataclass that turns one attention call into a plan. Kernels, attachment to a
model, text, reuse, records and reports come with it.
"""

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

import gossamer as gs


@dataclass(frozen=True, kw_only=True)
class NearFrames(gs.Method):
    """Read the keys of the frames nearest to the query's own frame.

    Without a grid every token is a frame of its own: the nearest tokens of a sequence.

    Attributes:
        density: Share of the keys that each query reads; the last frame is cut to meet it.
        tile: Queries per tile; a tile never crosses a frame.
    """

    name: ClassVar[str] = "near-frames"
    paper: ClassVar[str] = "an example"
    causal_reason: ClassVar[str] = "a frame reads later frames as well as earlier ones"

    density: float = 0.2
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse a density that is none, and a tile without rows."""
        if not 0 < self.density <= 1:
            raise gs.PlanError(f"near-frames: density={self.density} must be above 0, at most 1")
        if self.tile < 1:
            raise gs.PlanError(f"near-frames: tile={self.tile} must be at least 1")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method at a density: what `get_method(name, density=…)` calls."""
        return cls(density=density, **params)

    def static_key(self, call: gs.Call) -> Hashable:
        """Say that the plan depends on the grid alone, so that a session makes it once."""
        del call
        return self

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: gs.Call, state: MutableMapping[str, Any] | None
    ) -> gs.SparsePlan:
        """Plan the latent tokens: one key row per frame, which all tiles of the frame share."""
        del v, state
        frames, rows, columns = call.grid or (q.shape[2], 1, 1)
        area = rows * columns
        device = q.device

        # Queries: tiles that end where their frame ends; -1 marks tile rows without a query.
        tiles = -(-area // self.tile)
        place = torch.arange(tiles * self.tile, device=device)
        place = torch.where(place < area, place, -1).view(1, tiles, self.tile)
        first = area * torch.arange(frames, device=device)[:, None, None]
        query_index = torch.where(place < 0, -1, first + place)  # [F, tiles, tile]
        tile_row = torch.arange(frames, device=device).repeat_interleave(tiles)  # [F * tiles]

        # Keys: sort them by the distance of their frame, padding last, and take a share of them.
        frame = torch.arange(frames, device=device)
        distance = (frame.repeat_interleave(area) - frame[:, None]).abs()[None]  # [1, F, S]
        count = torch.full((1, 1, frames), round(self.density * k.shape[2]), device=device)
        if call.key_valid is not None:
            distance = distance.masked_fill(~call.key_valid[:, None], frames)  # [B, F, S]
            valid = call.key_valid.sum(-1)[:, None, None]  # [B, 1, 1]
            count = (self.density * valid).round().long().expand(-1, 1, frames)
        count = count.clamp(min=1)
        nearest = distance.argsort(dim=-1, stable=True)[..., : int(count.max())]
        # Ascending inside each row's own count, as plans ask for; the slack behind it repeats.
        slack = torch.arange(nearest.shape[-1], device=device) >= count[:, 0, :, None]
        index = nearest.masked_fill(slack, k.shape[2]).sort(dim=-1).values
        index = torch.where(slack, index[..., :1], index)

        return gs.SparsePlan(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=self.tile,
            keys=gs.KeyTokens.from_lists(index[:, None], count=count),  # [B, 1, F, L]
            query_index=query_index.int().view(1, 1, -1, self.tile),
            tile_row=tile_row.int().view(1, 1, -1),
            key_valid=call.key_valid,
            scale=call.scale,
        )
