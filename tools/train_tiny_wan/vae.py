"""Train the autoencoder for a fixed time.

    torchrun --nproc-per-node 2 tools/train_tiny_wan/vae.py --bank bank.npz --out run --budget 130

Writes ``vae.safetensors`` (weights, and the latents' mean and deviation as metadata) and
``vae.png`` (clips above their reconstructions).
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path

import numpy as np
import runtime
import sequence
import torch
import torch.nn.functional as F
from build import build_vae
from config import CONFIG_FILE, Config, load
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors.torch import load_file

from data import Bank, Composer


def calm(vae: AutoencoderKLWan) -> None:
    """Start every residual block as its shortcut, by zeroing its last layer."""
    for name, parameter in vae.named_parameters():
        if ".conv2." in name or ".proj." in name:
            torch.nn.init.zeros_(parameter)


def gradient_distance(video: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of finite differences along x, y and time, ``[B, 3, T, H, W]``."""
    terms = [F.l1_loss(video.diff(dim=dim), target.diff(dim=dim)) for dim in (-1, -2, -3)]
    return torch.stack(terms).mean()


def loss_terms(
    vae: AutoencoderKLWan, clips: torch.Tensor, config: Config
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the training loss of clips ``[B, 3, T, H, W]``, and its parts for the log."""
    mean, log_variance = sequence.encode(vae, clips)
    latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    video = sequence.decode(vae, latents).float()
    parts = {
        "l1": F.l1_loss(video, clips),
        "gradient": gradient_distance(video, clips),
        "kl": 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean(),
        "mse": F.mse_loss(video.detach().clamp(-1, 1), clips),
    }
    train = config.train_vae
    loss = parts["l1"] + train.gradient_weight * parts["gradient"] + train.kl_weight * parts["kl"]
    return loss, parts


class Step:
    """Forward and backward pass on clips of one size; on a GPU, replayed as a CUDA graph.

    The autoencoder is small, so that launching its kernels one by one takes longer than running
    them.

    Args:
        vae: Autoencoder whose gradients are computed.
        config: Loss weights.
        clips: Example input, ``[B, 3, T, H, W]``.
        graphed: Whether to use a CUDA graph on a GPU.
    """

    def __init__(
        self, vae: AutoencoderKLWan, config: Config, clips: torch.Tensor, *, graphed: bool = True
    ) -> None:
        self._vae, self._config = vae, config
        self._parameters = list(vae.parameters())
        self._clips = clips.clone()
        self._graph: torch.cuda.CUDAGraph | None = None
        if graphed and clips.is_cuda:
            self._capture()

    def __call__(self, clips: torch.Tensor) -> dict[str, torch.Tensor]:
        """Leave the gradients of clips in the parameters; return the parts of the loss."""
        self._clips.copy_(clips)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._parts

    def _run(self) -> dict[str, torch.Tensor]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)
        with runtime.mixed_precision(self._clips.device):
            loss, parts = loss_terms(self._vae, self._clips, self._config)
        loss.backward()
        return {name: part.detach() for name, part in parts.items()}

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # allocates gradients and lets libraries set themselves up
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The communication library's watchdog thread may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._parts = self._run()
        self._graph = graph


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio of videos in [-1, 1], in dB."""
    return float(10 * np.log10(4 / max(mse, 1e-12)))


def train(
    config: Config,
    bank: Path,
    budget: float,
    process: runtime.Process,
    init: Path | None = None,
    *,
    graphed: bool = True,
) -> AutoencoderKLWan:
    """Train, and return the averaged model on the process's device.

    Args:
        config: Geometry and training settings.
        bank: Backgrounds.
        budget: Seconds.
        process: This process.
        init: A folder with ``vae.safetensors`` to go on from; None to start anew.
        graphed: Whether to replay steps as CUDA graphs.
    """
    settings = config.train_vae
    torch.manual_seed(config.seed)
    vae = build_vae(config).to(process.device)
    calm(vae)
    if init is not None:
        weights = load_file(str(init / "vae.safetensors"))
        vae.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    average = copy.deepcopy(vae).requires_grad_(False)
    parameters = list(vae.parameters())
    ema = runtime.Average(parameters, average.parameters(), settings.ema)
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)
    composer = Composer(
        Bank.load(bank, process.device), config.seed + 100 * process.rank + 7 * (init is not None)
    )
    torch.manual_seed(config.seed + 1 + process.rank)
    order, shares = random.Random(config.seed), [size.share for size in settings.sizes]
    clock, step = runtime.Clock(process, budget), 0
    steps = [
        Step(
            vae,
            config,
            composer.render(composer.draw(size.batch), tuple(size.video)),
            graphed=graphed,
        )
        for size in settings.sizes
    ]
    while (spent := clock.spent(step)) < 1:
        runtime.set_learning_rate([optimizer], settings.learning_rate, step, settings.warmup, spent)
        index = order.choices(range(len(steps)), shares)[0]
        size = settings.sizes[index]
        parts = steps[index](composer.render(composer.draw(size.batch), tuple(size.video)))
        runtime.average_gradients(parameters, process)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ema.update()
        if step % 200 == 0:
            facts = {name: round(part.item(), 5) for name, part in parts.items()}
            facts["psnr"] = round(psnr(facts["mse"]), 2)
            process.report(vae_step=step, seconds=round(clock.seconds, 1), **facts)
        step += 1
    process.report(vae_steps=step, seconds=round(clock.seconds, 1))
    return average.eval()


@torch.no_grad()
def measure(
    vae: AutoencoderKLWan, composer: Composer, config: Config, clips: int = 64
) -> dict[str, object]:
    """Measure the latents' statistics and the reconstruction at the default size.

    Returns:
        ``mean`` and ``std`` by latent channel, and ``psnr`` in dB.
    """
    video = (config.video.num_frames, config.video.height, config.video.width)
    latents, errors = [], []
    for _ in range(max(clips // 8, 1)):
        batch = composer.render(composer.draw(min(clips, 8)), video)
        latent, _ = sequence.encode(vae, batch)
        errors.append(F.mse_loss(sequence.decode(vae, latent).clamp(-1, 1), batch).item())
        latents.append(latent.transpose(0, 1).flatten(1))
    stacked = torch.cat(latents, dim=1)
    return {
        "mean": [round(x, 4) for x in stacked.mean(1).tolist()],
        "std": [round(x, 4) for x in stacked.std(1).tolist()],
        "psnr": round(psnr(float(np.mean(errors))), 2),
    }


@torch.no_grad()
def picture(vae: AutoencoderKLWan, composer: Composer, config: Config, path: Path) -> None:
    """Save a few clips above their reconstructions."""
    video = (config.video.num_frames, config.video.height, config.video.width)
    clips = composer.render(composer.draw(3), video)
    decoded = sequence.decode(vae, sequence.encode(vae, clips)[0])
    rows = []
    for pair in zip(clips, decoded, strict=True):
        for clip in pair:
            frames = ((clip + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0).cpu()
            rows.append(np.concatenate(list(frames[:: max(len(frames) // 4, 1)].numpy()), axis=1))
    Image.fromarray(np.concatenate(rows)).save(path)


def main() -> None:
    """Train, measure and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=130, help="seconds")
    parser.add_argument("--init", type=Path, default=None, help="folder with weights to go on from")
    parser.add_argument("--no-graph", action="store_true", help="launch kernels one by one")
    parser.add_argument("--config", type=Path, default=CONFIG_FILE)
    options = parser.parse_args()
    config = load(options.config)
    with runtime.start() as process:
        vae = train(
            config,
            options.bank,
            options.budget,
            process,
            options.init,
            graphed=not options.no_graph,
        )
        if process.is_main:
            composer = Composer(Bank.load(options.bank, process.device), 999, held_out=True)
            facts = measure(vae, composer, config, clips=64 if torch.cuda.is_available() else 1)
            process.report(**facts)
            runtime.save_weights(vae, options.out / "vae.safetensors", torch.float16, facts)
            picture(vae, composer, config, options.out / "vae.png")


if __name__ == "__main__":
    main()
