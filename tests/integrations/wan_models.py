"""Tiny Wan models and pipelines with random weights, and what the tests look at in them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)

import gossamer as gs

GRID = (4, 4, 5)
LATENT = (4, 8, 10)  # frames, height, width before 2 x 2 patches


def wan(num_layers: int = 3, seed: int = 0, **config: Any) -> WanTransformer3DModel:
    """Return a model of 2 heads of 12 channels."""
    torch.manual_seed(seed)
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 32,
    }
    return WanTransformer3DModel(num_layers=num_layers, **(settings | config)).eval()


def wan_i2v(num_layers: int = 2) -> WanTransformer3DModel:
    """Return a model whose attn2 dispatches twice: to the image's tokens and to the text's."""
    return wan(num_layers, image_dim=16, added_kv_proj_dim=24)


def inputs(latent: tuple[int, int, int] = LATENT, batch: int = 1, seed: int = 1) -> dict[str, Any]:
    """Return the arguments of one forward."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, *latent, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 7, 16, generator=generator),
        "return_dict": False,
    }


def i2v_inputs() -> dict[str, Any]:
    """Return the arguments of one forward of an image-to-video model."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(1, 512, 16, generator=generator)
    image = torch.randn(1, 9, 16, generator=generator)
    return inputs() | {"encoder_hidden_states": text, "encoder_hidden_states_image": image}


def run(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """Run one forward without gradients."""
    with torch.no_grad():
        return model(**arguments)[0]


def sparse(**settings: Any) -> gs.Recipe:
    """Return a recipe that is really sparse on `GRID`'s 80 tokens."""
    method = gs.BlockTopK(density=0.3, tile=8, block=8)
    return gs.Recipe(**({"method": method, "min_tokens": 0} | settings))


def full() -> gs.Recipe:
    """Return a recipe that plans every call at density 1."""
    return sparse(method=gs.BlockTopK(density=1.0, tile=8, block=8))


def pipeline(transformer: Any, transformer_2: Any = None, **config: Any) -> WanPipeline:
    """Return a text-to-video pipeline without text encoder and VAE."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000
    )
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=scheduler,
        transformer=transformer,
        transformer_2=transformer_2,
        **config,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def i2v_pipeline(transformer: Any, transformer_2: Any = None, **config: Any) -> Any:
    """Return an image-to-video pipeline with a tiny VAE; it tells the models no step."""
    torch.manual_seed(3)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    pipe = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        image_processor=None,
        image_encoder=None,
        transformer=transformer,
        transformer_2=transformer_2,
        **config,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, steps: int = 4, seed: int = 0, **arguments: Any) -> torch.Tensor:
    """Run a generation with both guidance passes and return its latents."""
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randn(2, 1, 7, 16, generator=generator)
    settings = {
        "prompt_embeds": prompts[0],
        "negative_prompt_embeds": prompts[1],
        "height": 64,
        "width": 80,
        "num_frames": 13,
        "num_inference_steps": steps,
        "guidance_scale": 3.0,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
    }
    return pipe(**(settings | arguments)).frames


@contextmanager
def collecting(target: Any, recipe: gs.Recipe | None = None) -> Any:
    """Attach for the time of a block and yield (handle, events)."""
    events: list[Any] = []
    with gs.apply(target, recipe or sparse(), observer=events.append) as handle:
        yield handle, events


@dataclass(frozen=True, kw_only=True)
class Remembering(gs.BlockTopK):
    """A method that writes each call into its state, and into `log` what it found there.

    `log` holds (call, what was found: the (layer, branch, step) of the state's last user or None).
    """

    density: float | None = 0.3
    tile: int = 8
    block: int = 8
    log: list[tuple[gs.Call, tuple[int, str, int] | None]] = field(default_factory=list)

    def _plan_latent(self, q: Any, k: Any, v: Any, call: gs.Call, state: Any) -> gs.SparsePlan:
        self.log.append((call, state.get("last")))
        state["last"] = (call.layer, call.branch, call.step)
        return super()._plan_latent(q, k, v, call, state)


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """Return everything that attaching could change: attributes of modules and processors."""
    shot: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            shot[f"{name}:{key}"] = tuple(value) if isinstance(value, dict) else id(value)
        processor = getattr(module, "processor", None)
        if processor is not None:
            shot[f"{name} processor"] = (id(processor), type(processor), dict(vars(processor)))
    return shot
