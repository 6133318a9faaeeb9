"""Compose training clips on the device: a moving shape over a panning background."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import torch
from captions import COLOURS, MOTIONS, PANS, SHAPES, Scene, all_scenes

# Saturated colours, in the order of captions.COLOURS. Their hues are at least 44 degrees apart.
RGB = {
    "red": (0.90, 0.12, 0.12),
    "yellow": (0.95, 0.86, 0.12),
    "green": (0.12, 0.75, 0.20),
    "cyan": (0.12, 0.85, 0.90),
    "blue": (0.15, 0.25, 0.92),
    "purple": (0.66, 0.18, 0.88),
}
STEPS = {"still": (0, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
RADIUS = (0.17, 0.22)  # of the frame's shorter side
SPEED = (0.011, 0.018)  # of the frame's side along the motion, a frame
PAN_SPEED = (1.0, 2.0)  # pixels a frame
RIM = 2.5  # pixels of darker outline


@dataclasses.dataclass(frozen=True)
class Bank:
    """Backgrounds on a device.

    Attributes:
        frames: ``[N, 240, 360, 3]``, uint8.
        first: Index of each background's first frame, ``[5]``, int64.
        count: Number of each background's frames, ``[5]``, int64.
        texture: The shapes' surface, ``[128, 128]``, float32, mean 0, about -1 to 1.
    """

    frames: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    texture: torch.Tensor

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Bank:
        """Read what ``bank.py`` wrote."""
        with np.load(path) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]).to(device) for name in arrays.files}
        texture = tensors.pop("texture").float()
        texture = ((texture - texture.mean()) / (2 * texture.std())).clamp(-1, 1)
        return cls(texture=texture, **tensors)


class Composer:
    """Draws scenes of one side of the split and renders them.

    Args:
        bank: Backgrounds.
        seed: Seed of every random choice.
        held_out: Which side of the split to draw from.
    """

    def __init__(self, bank: Bank, seed: int, *, held_out: bool = False) -> None:
        self.bank = bank
        self.device = bank.frames.device
        self.seed = seed
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._picks = random.Random(seed)
        self.scenes = all_scenes(held_out=held_out)
        self.colours = torch.tensor([RGB[name] for name in COLOURS], device=self.device)
        self.motions = torch.tensor([STEPS[name] for name in MOTIONS], device=self.device)
        self.pans = torch.tensor([STEPS[name] for name in PANS], device=self.device)

    def draw(self, count: int) -> list[Scene]:
        """Draw scenes uniformly, with replacement."""
        return self._picks.choices(self.scenes, k=count)

    def render(self, scenes: list[Scene], video: tuple[int, int, int]) -> torch.Tensor:
        """Render one clip a scene.

        Args:
            scenes: What to show.
            video: Frames, height and width.

        Returns:
            ``[B, 3, T, H, W]``, float32, in [-1, 1].
        """
        rows = [dataclasses.astuple(scene) for scene in scenes]
        slots = torch.tensor(rows).to(self.device, non_blocking=True)
        colour, shape, motion, background, pan = slots.unbind(1)
        canvas = self._background(background, self.pans[pan].float(), video)  # [B, T, H, W, 3]
        dy, dx, radius = self._path(self.motions[motion].float(), video)
        distance = signed_distance(dy, dx, radius, shape)  # [B, T, H, W]
        surface = self._surface(dy, dx, distance)
        paint = self.colours[colour][:, None, None, None] * surface[..., None]
        alpha = (0.5 - distance).clamp(0, 1)[..., None]
        canvas = torch.lerp(canvas, paint, alpha)
        return canvas.permute(0, 4, 1, 2, 3) * 2 - 1

    def _uniform(self, count: int, low: float, high: float) -> torch.Tensor:
        unit = torch.rand(count, device=self.device, generator=self.generator)
        return low + (high - low) * unit

    def _background(
        self, background: torch.Tensor, pan: torch.Tensor, video: tuple[int, int, int]
    ) -> torch.Tensor:
        """Crop the panning view: ``[B, T, H, W, 3]``, float32, in [0, 1]."""
        frames, height, width = video
        batch = len(background)
        time = torch.arange(frames, device=self.device)
        free = torch.tensor(self.bank.frames.shape[1:3], device=self.device) - 1
        free = free - torch.tensor([height, width], device=self.device)
        travel = pan * self._uniform(batch, *PAN_SPEED)[:, None] * (frames - 1)
        travel = torch.minimum(travel.abs(), free) * pan.sign()
        start = torch.rand(batch, 2, device=self.device, generator=self.generator)
        start = start * (free - travel.abs()) + (-travel).clamp(min=0)
        corner = start[:, None] + travel[:, None] * (time / max(frames - 1, 1))[None, :, None]
        # A film plays on; a still image has one frame.
        latest = (self.bank.count[background] - frames).clamp(min=0)
        begin = (self._uniform(batch, 0, 1) * (latest + 1)).long()
        index = torch.minimum(begin[:, None] + time, self.bank.count[background][:, None] - 1)
        index = index + self.bank.first[background][:, None]  # [B, T]
        y = corner[..., 0, None] + torch.arange(height, device=self.device)  # [B, T, H]
        x = corner[..., 1, None] + torch.arange(width, device=self.device)  # [B, T, W]
        y0, x0 = y.long(), x.long()

        def pixels(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            picked = self.bank.frames[
                index[:, :, None, None], rows[:, :, :, None], columns[:, :, None, :]
            ]
            return picked.float() / 255

        fx = (x - x0)[:, :, None, :, None]
        fy = (y - y0)[:, :, :, None, None]
        top = torch.lerp(pixels(y0, x0), pixels(y0, x0 + 1), fx)
        bottom = torch.lerp(pixels(y0 + 1, x0), pixels(y0 + 1, x0 + 1), fx)
        return torch.lerp(top, bottom, fy)

    def _path(
        self, motion: torch.Tensor, video: tuple[int, int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Place the shape: offsets of each pixel from its centre, ``[B, T, H, W]``, and radius."""
        frames, height, width = video
        batch = len(motion)
        side = torch.tensor([height, width], device=self.device).float()
        radius = self._uniform(batch, *RADIUS) * min(height, width)
        room = side - 1.8 * radius[:, None]  # the shape stays in view
        travel = self._uniform(batch, *SPEED)[:, None] * side * (frames - 1)
        travel = torch.minimum(travel, room) * motion
        start = torch.rand(batch, 2, device=self.device, generator=self.generator)
        start = start * (room - travel.abs()) + (-travel).clamp(min=0) + 0.9 * radius[:, None]
        time = torch.arange(frames, device=self.device) / max(frames - 1, 1)
        centre = start[:, None] + travel[:, None] * time[None, :, None]  # [B, T, 2]
        y = torch.arange(height, device=self.device) - centre[..., 0, None]  # [B, T, H]
        x = torch.arange(width, device=self.device) - centre[..., 1, None]  # [B, T, W]
        dy = y[:, :, :, None].expand(batch, frames, height, width)
        dx = x[:, :, None, :].expand(batch, frames, height, width)
        return dy, dx, radius

    def _surface(self, dy: torch.Tensor, dx: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Shade the shape: texture fixed to it, darker towards its rim, ``[B, T, H, W]``."""
        size = self.bank.texture.shape[0]
        row = (dy + size / 2).clamp(0, size - 1.001)
        column = (dx + size / 2).clamp(0, size - 1.001)
        y0, x0 = row.long(), column.long()
        top = torch.lerp(self.bank.texture[y0, x0], self.bank.texture[y0, x0 + 1], column - x0)
        below = torch.lerp(
            self.bank.texture[y0 + 1, x0], self.bank.texture[y0 + 1, x0 + 1], column - x0
        )
        texture = torch.lerp(top, below, row - y0)
        rim = (1 + distance / RIM).clamp(0, 1)  # 1 at the edge, 0 a rim's width inside
        return (0.9 + 0.1 * texture) * (1 - 0.5 * rim)


def _fold(dy: torch.Tensor, dx: torch.Tensor, sides: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distance from the centre and angle to the nearest of ``sides`` axes, one upwards."""
    sector = 2 * math.pi / sides
    angle = torch.atan2(dx, -dy)
    return torch.hypot(dy, dx), angle - sector * torch.round(angle / sector)


def signed_distance(
    dy: torch.Tensor, dx: torch.Tensor, radius: torch.Tensor, shape: torch.Tensor
) -> torch.Tensor:
    """Measure how far pixels lie outside a shape, in pixels; exact near straight edges.

    Args:
        dy: Pixel rows relative to the centre, ``[B, T, H, W]``.
        dx: Pixel columns relative to the centre, same shape.
        radius: Circumscribed radius in pixels, ``[B]``.
        shape: Index into ``captions.SHAPES``, ``[B]``.

    Returns:
        Signed distance, negative inside, ``[B, T, H, W]``.
    """
    r = radius[:, None, None, None]
    centre = torch.hypot(dy, dx)
    circle = centre - r
    square = torch.maximum(dy.abs(), dx.abs()) - 0.86 * r
    # Edges of a triangle face the axes that point down and up-left/right: flip, then fold by 3.
    length, angle = _fold(-(dy - 0.22 * r), dx, 3)
    triangle = length * torch.cos(angle) - 0.62 * r
    # An edge of a star runs from a tip at angle 0 to a notch at 36 degrees, 0.48 r off the centre.
    length, angle = _fold(dy, dx, 5)
    angle = angle.abs()
    notch_x, notch_y = 0.48 * math.cos(math.pi / 5), 0.48 * math.sin(math.pi / 5)
    edge = math.hypot(1.08 - notch_x, notch_y)
    normal = (notch_y / edge, (1.08 - notch_x) / edge)
    along, across = length * torch.cos(angle), length * torch.sin(angle)
    star = normal[0] * (along - 1.08 * r) + normal[1] * across
    ring = torch.maximum(centre - r, 0.5 * r - centre)
    by_name = {
        "circle": circle, "square": square, "triangle": triangle, "star": star, "ring": ring
    }  # fmt: skip
    result = circle
    for index, name in enumerate(SHAPES):
        result = torch.where((shape == index)[:, None, None, None], by_name[name], result)
    return result
