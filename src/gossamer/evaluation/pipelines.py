"""Loading a pipeline from a folder, and refusing sizes that it cannot generate."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError

from gossamer.errors import GossamerError, MissingExtraError
from gossamer.evaluation.generation import Pipeline
from gossamer.evaluation.settings import Settings

# Read from both ends of a weight file: tells retrained weights apart without reading gigabytes.
_DIGEST_BYTES = 1 << 20
# Configurations, weights and tokenizers.
_LOADED = {".json", ".safetensors", ".bin", ".model", ".txt"}


class ModelError(GossamerError, ValueError):
    """A model folder cannot be read, or cannot generate what was asked."""


def load_pipeline(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> Pipeline:
    """Load a diffusers pipeline from a local folder.

    Args:
        folder: A folder with `model_index.json`; nothing is downloaded.
        device: Where to put it.
        dtype: Floating-point type of the weights; None for float32 on a CPU and bfloat16 elsewhere.

    Raises:
        ModelError: The folder is no pipeline, or a part of it is unreadable.
        MissingExtraError: diffusers is not installed.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise MissingExtraError("diffusers", "diffusers")
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{folder} is not a pipeline folder: it has no model_index.json; "
            "save one with pipe.save_pretrained(folder)"
        )
    from diffusers import DiffusionPipeline

    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    try:
        pipe = DiffusionPipeline.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype=dtype
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        # What diffusers and transformers raise for missing, truncated or foreign files.
        reason = str(error).strip().splitlines()
        raise ModelError(f"cannot load {folder}: {reason[0] if reason else error!r}") from error
    pipe.set_progress_bar_config(disable=True)  # whoever calls shows progress of its own
    return cast("Pipeline", pipe.to(device))


def model_digest(folder: Path) -> str:
    """Fingerprint a pipeline: of each file its name, its size and the megabyte at both ends.

    Only files that a pipeline is loaded from count: a README beside them changes no video.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _LOADED):
        digest.update(path.relative_to(folder).as_posix().encode())
        for chunk in _ends(path):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def check_size(pipe: Pipeline, settings: Settings) -> None:
    """Refuse a size that the pipeline would round or fail on halfway.

    Args:
        pipe: A pipeline with `vae_scale_factor_spatial` and `vae_scale_factor_temporal`; others are
            left to check for themselves.
        settings: What is going to be generated.

    Raises:
        ModelError: The size is not a multiple; the message names the nearest that is.
    """
    space: int | None = getattr(pipe, "vae_scale_factor_spatial", None)
    frames: int | None = getattr(pipe, "vae_scale_factor_temporal", None)
    patch = getattr(getattr(getattr(pipe, "transformer", None), "config", None), "patch_size", None)
    if space is not None and isinstance(patch, list | tuple):
        for name, size, side in zip(
            ("height", "width"), (settings.height, settings.width), patch[-2:], strict=True
        ):
            # Wan's pipeline asks for multiples of 16 whatever the model's own factors are.
            multiple = max(16, space * side)
            if size % multiple:
                nearest = max(multiple, round(size / multiple) * multiple)
                raise ModelError(
                    f"{name} must be a multiple of {multiple} for this model, got {size}: "
                    f"use {nearest}"
                )
    if frames is not None and frames > 1 and settings.num_frames % frames != 1:
        nearest = (settings.num_frames - 1) // frames * frames + 1
        raise ModelError(
            f"num_frames must be a multiple of {frames} plus 1 for this model, "
            f"got {settings.num_frames}: use {nearest} or {nearest + frames}"
        )


def _ends(path: Path) -> Iterator[bytes]:
    """Yield the size, the first and the last megabyte of a file."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        yield file.read(_DIGEST_BYTES)
        if size > _DIGEST_BYTES:
            file.seek(max(_DIGEST_BYTES, size - _DIGEST_BYTES))
            yield file.read()
