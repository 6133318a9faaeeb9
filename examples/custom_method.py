"""A method of one's own: each frame reads the frames nearest in time.

A method is a frozen dataclass that turns one attention call into a plan. Kernels, attachment to a
model, text, records and reports come with it.
"""

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from diffusers import WanPipeline
from torch import Tensor

import gossamer as gs
from gossamer.models import example_prompts, tiny_wan_path


@dataclass(frozen=True, kw_only=True)
class NearFrames(gs.Method):
    """Read the keys of the frames nearest to the query's own frame.

    Attributes:
        density: Share of the keys that each query reads; the last frame is cut to meet it.
        tile: Queries per tile; a tile never crosses a frame.
    """

    name: ClassVar[str] = "near-frames"
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
        if call.grid is None:
            raise gs.UnsupportedError("near-frames needs call.grid=(frames, rows, columns)")
        frames, rows, columns = call.grid
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


def main() -> None:
    """Check the plan on random tensors, then run it in a model."""
    q, k, v = torch.randn(3, 1, 2, 5 * 8 * 10, 32).unbind()
    call = gs.Call(grid=(5, 8, 10))
    for density in (0.1, 0.5, 1.0):
        plan = NearFrames(density=density).plan(q, k, v, call)
        plan.validate()
        fast, exact = (gs.attend(q, k, v, plan, kernel=name).out for name in ("cpu", "reference"))
        print(f"density {plan.density:.3f}, kernel error {(fast - exact).abs().max():.1e}")

    pipe = WanPipeline.from_pretrained(tiny_wan_path())
    with gs.apply(pipe, NearFrames(density=0.3)) as handle:
        pipe(example_prompts()[0], height=96, width=128, num_frames=29, num_inference_steps=2)
    print(handle.summary())


if __name__ == "__main__":
    main()
