"""Attach sparse attention to a video pipeline, generate, and say what ran."""

import torch
from diffusers import WanPipeline

import gossamer as gs
from gossamer.models import example_prompts, tiny_wan_path

pipe = WanPipeline.from_pretrained(tiny_wan_path())
recipe = gs.Recipe(method=gs.InstaGen(exact=0.08, sampled=0.08), dense_steps=0.3)
size = {"height": 96, "width": 128, "num_frames": 29, "num_inference_steps": 4}
with gs.apply(pipe, recipe) as handle:
    seed = torch.Generator().manual_seed(0)
    video = pipe(example_prompts()[0], **size, generator=seed).frames[0]
print(video.shape, handle.summary())
