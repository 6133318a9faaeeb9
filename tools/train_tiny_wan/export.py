"""Assemble the pipeline's folder from trained weights.

    python tools/train_tiny_wan/export.py --weights run --out src/gossamer/models/tiny_wan

Without ``--weights`` the folder holds random weights of the same geometry.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from build import build_scheduler, build_text_encoder, build_transformer, build_vae
from captions import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    PANS,
    SHAPES,
    build_tokenizer,
    held_out_prompts,
    plain_caption,
)
from config import CONFIG_FILE, Config, load
from diffusers import WanPipeline
from dit import load_vae
from safetensors.torch import load_file


def latent_grid(config: Config) -> tuple[int, int, int]:
    """Return the default call's token grid: frames, rows, columns."""
    video, vae, patch = config.video, config.vae, config.transformer.patch_size
    frames = (video.num_frames - 1) // vae.temporal_factor + 1
    rows, columns = video.height // vae.spatial_factor, video.width // vae.spatial_factor
    return frames // patch[0], rows // patch[1], columns // patch[2]


def prompts(config: Config) -> dict[str, Any]:
    """Describe what prompts may say, the held-out ones, and the defaults of a call."""
    scenes = held_out_prompts()
    frames, rows, columns = latent_grid(config)
    return {
        "template": "a {colour} {shape} moves {motion} over a {background}, camera {pan}",
        "vocabulary": {
            "colour": list(COLOURS),
            "shape": list(SHAPES),
            "motion": list(MOTIONS),
            "background": list(BACKGROUNDS),
            "pan": ["is still" if pan == "still" else f"pans {pan}" for pan in PANS],
        },
        "held_out": [plain_caption(scene) for scene in scenes],
        "held_out_slots": [scene.words() for scene in scenes],
        "held_out_rule": (
            "with slot values counted from 0 in the order above, (colour + 2 shape + 3 motion"
            " + 4 background) mod 10 = 7 never occurs in training, whatever the pan"
        ),
        "defaults": {
            "height": config.video.height,
            "width": config.video.width,
            "num_frames": config.video.num_frames,
            "num_inference_steps": config.video.num_steps,
            "guidance_scale": config.video.guidance,
            "fps": config.video.fps,
        },
        "geometry": {
            "grid": [frames, rows, columns],
            "tokens": frames * rows * columns,
            "layers": config.transformer.num_layers,
            "heads": config.transformer.num_heads,
            "head_dim": config.transformer.head_dim,
            "text_tokens": config.text.sequence_length,
        },
    }


def export(config: Config, weights: Path | None, out: Path) -> None:
    """Write the folder that ``WanPipeline.from_pretrained`` reads.

    Args:
        config: Geometry and defaults.
        weights: Folder with the files that ``vae.py`` and ``dit.py`` wrote; None for random ones.
        out: Target folder; other files in it stay.
    """
    torch.manual_seed(config.seed)
    transformer, text = build_transformer(config), build_text_encoder(config)
    if weights is None:
        vae = build_vae(config)
    else:
        vae = load_vae(config, weights)
        transformer.load_state_dict(_float(load_file(str(weights / "transformer.safetensors"))))
        missing, unexpected = text.load_state_dict(
            load_file(str(weights / "text_encoder.safetensors")), strict=False
        )
        # The embedding table is tied, so that one of its two names is absent.
        if unexpected or len(missing) > 1:
            raise ValueError(f"text encoder: missing {missing}, unexpected {unexpected}")
    # Half precision halves the folder; the text encoder stays in float32, because transformers
    # loads weights in the type in which they are stored, whereas diffusers loads float32.
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(config.text.sequence_length),
        text_encoder=text.float(),
        vae=vae.half(),
        scheduler=build_scheduler(config),
        transformer=transformer.half(),
    )
    pipeline.save_pretrained(out, safe_serialization=True)
    for file in out.glob("*/*.safetensors"):
        file.chmod(0o644)
    (out / "prompts.json").write_text(json.dumps(prompts(config), indent=2) + "\n")


def _float(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in state.items()}


def main() -> None:
    """Export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG_FILE)
    options = parser.parse_args()
    export(load(options.config), options.weights, options.out)


if __name__ == "__main__":
    main()
