"""Typed view of ``config.toml``: frozen, keyword-only, unknown keys refused."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal

CONFIG_FILE = Path(__file__).with_name("config.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """The pipeline's default call: frames, pixels, steps, guidance scale and playback rate."""

    num_frames: int
    height: int
    width: int
    num_steps: int
    guidance: float
    fps: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Vae:
    """Geometry of the ``AutoencoderKLWan``."""

    z_dim: int
    base_dim: int
    decoder_base_dim: int
    dim_mult: list[int]
    num_res_blocks: int
    patch_size: int
    temporal_downsample: list[bool]

    @property
    def spatial_factor(self) -> int:
        """Pixels along one side of a latent."""
        return self.patch_size * 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal_factor(self) -> int:
        """Frames in a latent frame, the first one excepted."""
        return 2 ** sum(self.temporal_downsample)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """Geometry of the ``WanTransformer3DModel``."""

    num_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    freq_dim: int
    patch_size: list[int]
    max_rope_length: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Geometry of the ``UMT5EncoderModel`` and the lengths of its input."""

    dim: int
    head_dim: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    max_words: int
    sequence_length: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Flow matching: time shift, and the share of captions replaced by the empty one."""

    shift: float
    caption_dropout: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainSize:
    """One video size ``(frames, height, width)`` in the autoencoder's training mix."""

    video: list[int]
    share: float
    batch: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """One video size in the transformer's training mix.

    Its share of steps moves linearly from ``share`` to ``end_share``; ``fresh`` is how many clips
    are rendered at a renewal.
    """

    video: list[int]
    share: float
    end_share: float
    batch: int
    fresh: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainVae:
    """How the autoencoder is trained."""

    learning_rate: float
    warmup: int
    gradient_weight: float
    kl_weight: float
    ema: float
    sizes: list[TrainSize]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainTransformer:
    """How the transformer and the text encoder are trained."""

    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    warmup: int
    weight_decay: float
    ema: float
    pool_clips: int
    renew_every: int
    sizes: list[PoolSize]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All of ``config.toml``."""

    seed: int
    video: Video
    vae: Vae
    transformer: Transformer
    text: Text
    flow: Flow
    train_vae: TrainVae
    train_transformer: TrainTransformer


def load(path: Path = CONFIG_FILE) -> Config:
    """Read a configuration file.

    Args:
        path: A TOML file with the keys of :class:`Config`.

    Returns:
        The configuration.

    Raises:
        TypeError: If a key is unknown or missing.
    """
    raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    sections = {
        "video": Video,
        "vae": Vae,
        "transformer": Transformer,
        "text": Text,
        "flow": Flow,
        "train_vae": TrainVae,
        "train_transformer": TrainTransformer,
    }
    for key, size in (("train_vae", TrainSize), ("train_transformer", PoolSize)):
        raw[key]["sizes"] = [size(**values) for values in raw[key]["sizes"]]
    return Config(**{k: sections[k](**v) if k in sections else v for k, v in raw.items()})
