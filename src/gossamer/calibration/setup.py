"""What a calibration measures: steps, buckets of steps, blocks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gossamer.errors import PlanError
from gossamer.select.fidelity import bucket_steps
from gossamer.select.profile import PERMUTES


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is measured of every generation.

    Attributes:
        num_steps: Denoising steps of a generation.
        num_buckets: Equal stretches of steps that share one threshold map.
        measured: Steps whose attention is measured, ascending.
        block: Tokens per block.
        permute: "axis" where each head gets its own order of frames, rows and columns, else "none".

    Raises:
        PlanError: A number out of range; the message gives it and the allowed ones.
    """

    num_steps: int
    num_buckets: int
    measured: tuple[int, ...]
    block: int = 128
    permute: str = "none"

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if not 1 <= self.num_buckets <= self.num_steps:
            raise PlanError(
                f"num_buckets={self.num_buckets}: must be between 1 and num_steps={self.num_steps}"
            )
        inside = all(0 <= step < self.num_steps for step in self.measured)
        if not self.measured or not inside or list(self.measured) != sorted(set(self.measured)):
            raise PlanError(
                f"measured={self.measured}: must be ascending steps below num_steps="
                f"{self.num_steps}"
            )
        if self.block < 1:
            raise PlanError(f"block={self.block}: must be at least 1")
        if self.permute not in PERMUTES:
            raise PlanError(f"permute={self.permute!r}: must be one of {PERMUTES}")

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The buckets that read each measured step.

        A step that is measured reads itself; one that is not reads its nearest measured neighbours
        on both sides, so that its map is the union of theirs.
        """
        readers: dict[int, set[int]] = {step: set() for step in self.measured}
        for bucket, steps in enumerate(bucket_steps(self.num_steps, self.num_buckets)):
            for step in steps:
                below = [m for m in self.measured if m <= step][-1:]
                above = [m for m in self.measured if m >= step][:1]
                for measured in below + above:
                    readers[measured].add(bucket)
        return {step: sorted(buckets) for step, buckets in readers.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the setup as JSON-able values."""
        return {**asdict(self), "measured": list(self.measured)}


def measured_steps(num_steps: int, number: int | None) -> tuple[int, ...]:
    """Return `number` steps spread evenly from the first to the last one; None for all.

    Raises:
        PlanError: Not between 1 and `num_steps`.
    """
    if number is None:
        return tuple(range(num_steps))
    if not 1 <= number <= num_steps:
        raise PlanError(f"{number} measured steps: must be between 1 and num_steps={num_steps}")
    if number == 1:
        return (num_steps // 2,)
    return tuple(i * (num_steps - 1) // (number - 1) for i in range(number))
