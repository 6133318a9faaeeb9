"""VSA: cubes of the video grid, and the top cubes of a coarse attention map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.methods.params import check_share, refuse_unused
from gossamer.methods.regions import RegionMethod, Regions, check_sides
from gossamer.methods.registry import register
from gossamer.select import top_blocks
from gossamer.select.spread import take_spread


@register
@dataclass(frozen=True, kw_only=True)
class VSA(RegionMethod):
    """Read, for each cube of queries, the key cubes with the highest coarse attention.

    The grid is cut into cubes. The coarse map is the attention of the cubes' means; each row keeps
    its top k = ceil(keep * cubes) cubes, and tokens attend to all tokens of these (the fine
    branch).

    The coarse branch's output is left out: its gate is trained, and an untrained gate is off. The
    public code adds it with weight 1 where no gate is given, which is wrong without training.

    Differs from the public code: the grid need not be a multiple of the cube; cubes at the borders
    are ragged, and means, budgets and density count their true tokens. A call without a grid is cut
    into runs of as many consecutive tokens as a cube holds. Text is read by every row and reads
    everything.

    Attributes:
        density: Share of the visible pairs; whole cubes are read, best first, and fractions are
            spread over the rows, so that the whole plan meets it. None: `keep` decides.
        keep: Share of the cubes that each row keeps, rounded up to whole cubes (1 - sparsity of the
            public code; its default sparsity is 0.9); used where no density is given.
        cube: (frames, rows, columns) of a cube (paper: 4, 4, 4).
    """

    name: ClassVar[str] = "vsa"
    paper: ClassVar[str] = "VSA: Faster Video Diffusion with Trainable Sparse Attention, 2505.13389"

    keep: float = 0.1
    cube: tuple[int, int, int] = (4, 4, 4)

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_share(self.name, "keep", self.keep)
        object.__setattr__(self, "cube", check_sides(self.name, "cube", self.cube, 3))
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "keep")

    def _shape(self) -> tuple[int, int, int]:
        """Return the cube."""
        return self.cube

    def _keep(self, regions: Regions) -> Tensor:
        """Keep the top cubes of each row; softmax keeps the order of logits."""
        sizes = regions.num_keys[:, None, None]  # [B|1, 1, 1, C]
        if self.density is None:
            count = (
                ((sizes > 0).sum(-1).double() * self.keep).ceil().long().clamp(min=1)
            )  # [B|1, 1, 1]
            return top_blocks(regions.scores, count.expand(regions.scores.shape[:3]))
        if self.density >= 1:
            return regions.scores > -float("inf")
        budget = sizes.sum(-1).double() * self.density
        return take_spread(regions.scores, sizes, budget)
