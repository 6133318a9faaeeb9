"""PISA: the best key blocks exactly, all others by their means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.methods.compensated import CompensatedMethod, Pooled
from gossamer.methods.params import check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.select import top_blocks


@register
@dataclass(frozen=True, kw_only=True)
class PISA(CompensatedMethod):
    """Read the best key blocks exactly and every other block as one key: its mean.

    Consecutive queries and keys are cut into blocks; a block pair's score is q_mean . k_mean. Each
    row reads its best blocks exactly. Every other block j enters the same softmax at zeroth order,
    as one virtual key: the mean of its keys, with the mean of its values and the weight |j|, so
    that it adds |j| exp(scale * q . k_mean) to the denominator.

    The paper's first-order term is left out: it is one global linear correction, q times the sum
    of (k - k_mean)^T v over the approximated blocks, which is no key and value and so no part of a
    plan.

    Differs from the public code: any number of tokens, ragged last block with its true size; the
    virtual keys stand in the softmax like all others, so their share is rescaled with the running
    maximum as exact keys' is; text is read exactly by every row and reads everything.

    Virtual keys count in the density: exact keys plus virtual ones meet the one asked for. A row
    reads its best block exactly in any case, and each other block costs its virtual key: a lower
    density than blocks + block keys of a row (1/64 + 64/keys) is not to be had, and this is what
    asking for one gives.
    At density 1 all blocks are exact and no virtual key is made.

    Attributes:
        density: Share of the visible pairs, one for each virtual key of a query counted; whole
            blocks are read, and fractions are spread over the rows. None: `exact` decides.
        exact: Share of the blocks read exactly (paper: 0.1 to 0.15); used where no density is.
        block: Keys per block (paper: 64).
        tile: Queries per tile (paper: 64).
    """

    name: ClassVar[str] = "pisa"
    paper: ClassVar[str] = "PISA: Piecewise Sparse Attention, arXiv 2602.01077"

    exact: float = 0.15

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_share(self.name, "exact", self.exact)
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "exact")

    def _own(self, pooled: Pooled) -> Tensor:
        """Keep the best blocks, `exact` of those that hold keys, rounded up."""
        count = (
            ((pooled.size > 0).sum(-1).double() * self.exact).ceil().long().clamp(min=1)
        )  # [B|1]
        return top_blocks(pooled.scores, count[:, None, None].expand(pooled.scores.shape[:3]))

    def _most_own(self, num_blocks: int) -> int:
        """Return how many blocks of `num_blocks` are exact."""
        return math.ceil(num_blocks * self.exact)
