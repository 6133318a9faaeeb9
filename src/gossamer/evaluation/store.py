"""Where a comparison keeps its runs: one file per finished run, so that it can stop at any time.

    DIR/results.json              every finished run of the last command
    DIR/runs/KEY.json             one run and what it was made with
    DIR/videos/KEY.mp4
    DIR/records/KEY.json          its attention calls
    DIR/plans.json                coarse plan masks of one run per method
    DIR/reference/KEY.safetensors float frames of a dense run, which later methods are compared with

A run counts as finished when its file in `runs/` exists; that file is written last.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.evaluation.files import atomic_path, read_json, write_json
from gossamer.evaluation.settings import Settings
from gossamer.evaluation.variants import Variant
from gossamer.evaluation.video import write_video

# What of the environment changes a measurement; the date and the commit do not.
_ENVIRONMENT_KEYS = ("gossamer", "torch", "diffusers", "cpu", "threads", "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKey:
    """Which run: everything that would change its result.

    Attributes:
        prompt: The text.
        seed: Seed of the initial noise.
        variant: The recipe and its name.
        settings: Size, steps, guidance and model.
        environment: Versions, device and threads, as `environment()` gives them.
    """

    prompt: str
    seed: int
    variant: Variant
    settings: Settings
    environment: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the file stem: readable, and unique by a hash of everything above."""
        facts = {
            "prompt": self.prompt,
            "seed": self.seed,
            "method": self.variant.name,
            "recipe": self.variant.recipe.to_toml(),
            "settings": self.settings.to_dict(),
            "environment": {key: self.environment.get(key) for key in _ENVIRONMENT_KEYS},
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
        words = re.sub(r"[^a-z0-9]+", "-", self.prompt.lower()).strip("-")[:40].rstrip("-")
        return f"{words or 'prompt'}-s{self.seed}-{_slug(self.variant.label)}-{digest}"


@dataclass(frozen=True, slots=True)
class RunStore:
    """The runs under one output folder.

    Attributes:
        root: The folder.
    """

    root: Path

    def finished(self, key: RunKey) -> dict[str, Any] | None:
        """Return the stored run, or None if it has to be made (again)."""
        path = self._path("runs", key, ".json")
        if not path.is_file() or not self._path("videos", key, ".mp4").is_file():
            return None
        return read_json(path)

    def save(
        self,
        key: RunKey,
        run: Mapping[str, Any],
        frames: Tensor,
        records: list[dict[str, Any]],
        masks: list[dict[str, Any]],
    ) -> None:
        """Write a run's video and records, and last the run itself.

        Args:
            key: Which run.
            run: Its row of the results.
            frames: [frames, height, width, 3] floats in 0…1.
            records: Its attention calls, JSON-able.
            masks: Its coarse plan masks, JSON-able.

        Raises:
            OSError: A file cannot be written; the run then does not count as finished.
        """
        video, calls = self._path("videos", key, ".mp4"), self._path("records", key, ".json")
        write_video(video, frames, fps=key.settings.fps)
        write_json(calls, records, compact=True)
        row = {
            **run,
            "video": video.relative_to(self.root).as_posix(),
            "records": calls.relative_to(self.root).as_posix(),
        }
        write_json(self._path("runs", key, ".json"), {"run": row, "masks": masks}, compact=True)

    def save_reference(self, key: RunKey, frames: Tensor) -> None:
        """Keep the float frames of a dense run."""
        with atomic_path(self._path("reference", key, ".safetensors")) as scratch:
            save_file({"frames": frames.contiguous()}, scratch)

    def load_reference(self, key: RunKey) -> Tensor | None:
        """Return the float frames of a dense run, None where they are gone or unreadable."""
        path = self._path("reference", key, ".safetensors")
        try:
            return load_file(path)["frames"]
        except (OSError, SafetensorError, KeyError):
            return None  # the dense run is made again

    def _path(self, folder: str, key: RunKey, suffix: str) -> Path:
        return self.root / folder / f"{key.name}{suffix}"


def _slug(label: str) -> str:
    """Return a label with characters that every file system takes."""
    return re.sub(r"[^a-z0-9.-]+", "-", label.lower())
