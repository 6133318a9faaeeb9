"""What is generated: size, steps and guidance, checked before a model is asked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings that every run of a comparison shares.

    Attributes:
        model: The model's name, as the reports show it.
        height: Pixels.
        width: Pixels.
        num_frames: Frames of the video.
        steps: Denoising steps.
        fps: Frames per second of the files; the model does not see it.
        guidance_scale: Classifier-free guidance; at 1 and below the unconditional pass is left out.
        model_digest: Fingerprint of the weights, "" where unknown: runs of a retrained model are
            not mixed with older ones.
        dtype: Floating-point type of the weights, "" where unknown.

    Raises:
        ValueError: A number is not positive or not finite.
    """

    model: str
    height: int
    width: int
    num_frames: int
    steps: int
    guidance_scale: float
    fps: int = 16
    model_digest: str = ""
    dtype: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that no model can take."""
        for name in ("height", "width", "num_frames", "steps", "fps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not math.isfinite(self.guidance_scale) or self.guidance_scale < 0:
            raise ValueError(
                f"guidance_scale must be a finite number >= 0, got {self.guidance_scale}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-able values."""
        return asdict(self)
