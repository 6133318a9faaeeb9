"""What a case of `gossamer bench plans` is: tensors, and the calls whose time is planning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from gossamer.evaluation.bench.case import Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStage:
    """One call to time.

    Attributes:
        name: Which state it starts from or which part it is, such as "cold" and "warm".
        call: The call.
        check: Refuses a wrong result with an ArithmeticError or a PlanError, and returns the
            density of the plan in it; None where it holds no plan.
    """

    name: str
    call: Callable[[], Any]
    check: Callable[[Any], float | None]


class PlanCase(Protocol):
    """One method, or one part of planning, at one shape."""

    @property
    def name(self) -> str:
        """As results name it, e.g. "instagen-75600"."""
        ...

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v, bfloat16, the same every time."""
        ...

    def stages(self, tensors: Tensors, device: torch.device) -> Iterator[PlanStage]:
        """Yield the calls to time, in this order: each may build on those before.

        Args:
            tensors: What `tensors` returned.
            device: Where they lie.
        """
        ...

    def scaled(self, factor: float) -> Self:
        """Return the same case on about this share of its tokens; for tests."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of a video model's self-attention.

    Attributes:
        grid: (frames, rows, columns) of the latent tokens.
        heads: Query heads, as many as KV heads.
        dim: Head dim.
    """

    grid: tuple[int, int, int]
    heads: int = 12
    dim: int = 128

    @property
    def num_tokens(self) -> int:
        """N = S."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def scaled(self, factor: float) -> Shape:
        """Return the shape of about this share of the tokens, in the same proportions."""
        side = factor ** (1 / 3)
        frames, rows, columns = (max(4, round(x * side)) for x in self.grid)
        return Shape(grid=(frames, rows, columns), heads=min(self.heads, 2), dim=self.dim)


VIDEO_720P = Shape(grid=(21, 45, 80))
"""Wan2.1 at 81 frames of 1280 x 720: 8 x 8 pixels and 4 frames a latent, 2 x 2 latents a token."""

VIDEO_480P = Shape(grid=(21, 30, 52))
"""Wan2.1 at 81 frames of 832 x 480."""
