"""Train the transformer and the text encoder for a fixed time, on the autoencoder's latents.

    torchrun --nproc-per-node 2 tools/train_tiny_wan/dit.py --bank bank.npz --vae run --out run \
        --budget 500

Writes ``transformer.safetensors`` and ``text_encoder.safetensors``: averaged weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from pathlib import Path

import runtime
import sequence
import torch
import torch.nn.functional as F
from build import build_text_encoder, build_transformer, build_vae
from captions import build_tokenizer, caption
from config import CONFIG_FILE, Config, PoolSize, load
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from muon import Muon
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import UMT5EncoderModel

from data import Bank, Composer


def load_vae(config: Config, folder: Path) -> AutoencoderKLWan:
    """Load what ``vae.py`` saved, with its measured statistics in the configuration."""
    file = folder / "vae.safetensors"
    with safe_open(str(file), "pt") as handle:
        facts = json.loads(handle.metadata()["facts"])
    vae = build_vae(config, facts["mean"], facts["std"])
    vae.load_state_dict({k: v.float() for k, v in load_file(str(file)).items()})
    return vae.eval().requires_grad_(False)


def encode_text(
    encoder: UMT5EncoderModel, ids: torch.Tensor, mask: torch.Tensor, length: int
) -> torch.Tensor:
    """Encode prompts as ``WanPipeline`` does: padding becomes zeros, and stays unmasked.

    Padding is never attended to inside the encoder, so running it on the short ``max_words`` and
    padding afterwards gives what the pipeline gets from running it on ``length`` tokens.

    Args:
        encoder: Text encoder.
        ids: Token indices ``[B, W]``, int64.
        mask: 1 for tokens and 0 for padding, ``[B, W]``, int64.
        length: Length to pad to.

    Returns:
        ``[B, length, D]``, float32.
    """
    states = encoder(ids, mask).last_hidden_state * mask[..., None]
    return F.pad(states, (0, 0, 0, length - ids.shape[1]))


class Pool:
    """A ring of encoded clips of one size, constantly renewed.

    Args:
        size: Video size, and how many clips to renew a step.
        capacity: Clips to hold.
        composer: Source of clips.
        vae: Autoencoder.
        config: Everything else.
    """

    def __init__(
        self,
        size: PoolSize,
        capacity: int,
        composer: Composer,
        vae: AutoencoderKLWan,
        config: Config,
    ) -> None:
        self.size, self.config = size, config
        self._composer, self._vae = composer, vae
        device = composer.device
        self._words = random.Random(composer.seed)
        self._tokenizer = build_tokenizer(config.text.sequence_length)
        frames, height, width = size.video
        self._latents = torch.empty(
            capacity,
            config.vae.z_dim,
            (frames - 1) // config.vae.temporal_factor + 1,
            height // config.vae.spatial_factor,
            width // config.vae.spatial_factor,
            dtype=torch.bfloat16,
            device=device,
        )
        self._ids = torch.zeros(capacity, config.text.max_words, dtype=torch.long, device=device)
        self._mask = torch.zeros_like(self._ids)
        statistics = (vae.config.latents_mean, vae.config.latents_std)
        mean, std = (torch.tensor(s, device=device).view(1, -1, 1, 1, 1) for s in statistics)
        self._mean, self._std = mean, std
        self._next, self._filled, self._draws = 0, 0, 0

    def advance(self) -> None:
        """Renew some clips at every ``renew_every``-th call."""
        if self._draws % self.config.train_transformer.renew_every == 0:
            self.renew(self.size.fresh)
        self._draws += 1

    @torch.no_grad()
    def renew(self, count: int) -> None:
        """Render and encode ``count`` clips over the oldest ones."""
        scenes = self._composer.draw(count)
        clips = self._composer.render(scenes, tuple(self.size.video))
        with runtime.mixed_precision(self._composer.device):
            latents, _ = sequence.encode(self._vae, clips)
        words = self._tokenizer(
            [caption(scene, self._words) for scene in scenes],
            padding="max_length",
            max_length=self.config.text.max_words,
            return_tensors="pt",
        )
        capacity = len(self._latents)
        slots = torch.arange(self._next, self._next + count) % capacity
        slots = slots.to(self._latents.device, non_blocking=True)
        self._latents[slots] = ((latents - self._mean) / self._std).bfloat16()
        self._ids[slots] = words.input_ids.to(slots.device, non_blocking=True)
        self._mask[slots] = words.attention_mask.to(slots.device, non_blocking=True)
        self._next = (self._next + count) % capacity
        self._filled = min(self._filled + count, capacity)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw normalised latents ``[B, C, t, h, w]`` and their token indices and mask."""
        picks = torch.randint(self._filled, (count,), device=self._latents.device)
        return self._latents[picks].float(), self._ids[picks], self._mask[picks]

    def empty_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token indices and mask of the empty prompt, ``[W]`` each."""
        words = self._tokenizer(
            "", padding="max_length", max_length=self.config.text.max_words, return_tensors="pt"
        )
        device = self._latents.device
        return words.input_ids[0].to(device), words.attention_mask[0].to(device)


def flow_loss(
    transformer: WanTransformer3DModel,
    embeds: torch.Tensor,
    latents: torch.Tensor,
    shift: float,
) -> torch.Tensor:
    """Flow-matching loss: predict ``noise - latents`` at logit-normal, shifted times.

    Args:
        transformer: Denoiser.
        embeds: Prompt embeddings, ``[B, L, D]``.
        latents: Normalised latents, ``[B, C, t, h, w]``.
        shift: Time shift, the scheduler's ``flow_shift``.

    Returns:
        Mean squared error, a scalar.
    """
    unit = torch.sigmoid(torch.randn(len(latents), device=latents.device))
    time = shift * unit / (1 + (shift - 1) * unit)  # 1 is noise
    noise = torch.randn_like(latents)
    noisy = torch.lerp(latents, noise, time.view(-1, 1, 1, 1, 1))
    with runtime.mixed_precision(latents.device):
        velocity = transformer(noisy, time * 1000, embeds, return_dict=False)[0]
    return F.mse_loss(velocity.float(), noise - latents)


class Trainer:
    """The models, their averages, optimizer and pools of one process.

    Args:
        config: Everything but paths.
        bank: Backgrounds.
        vae: Folder with the trained autoencoder.
        process: This process.
    """

    def __init__(self, config: Config, bank: Path, vae: Path, process: runtime.Process) -> None:
        self.config, self.process = config, process
        settings, device = config.train_transformer, process.device
        torch.manual_seed(config.seed)
        self.text = build_text_encoder(config).to(device)
        self.transformer = build_transformer(config).to(device)
        self.average = copy.deepcopy(self.models()).eval().requires_grad_(False)
        self.parameters = [p for p in self.models().parameters() if p.requires_grad]
        self.ema = runtime.Average(
            self.models().parameters(), self.average.parameters(), settings.ema
        )
        self.optimizers = self._optimizers()
        torch.manual_seed(config.seed + 1 + process.rank)
        backgrounds, self.vae = Bank.load(bank, device), load_vae(config, vae).to(device)
        self.pools = [
            Pool(
                size,
                settings.pool_clips,
                Composer(backgrounds, config.seed + 1000 * process.rank + 10 * index),
                self.vae,
                config,
            )
            for index, size in enumerate(settings.sizes)
        ]
        self.empty_ids, self.empty_mask = self.pools[0].empty_prompt()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        settings = self.config.train_transformer
        matrices = [p for p in self.transformer.blocks.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices} if settings.optimizer == "muon" else set()
        others = [p for p in self.parameters if id(p) not in chosen]
        decay = settings.weight_decay
        result: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=decay, fused=True)
        ]
        if chosen:
            result.append(Muon(matrices, weight_decay=decay))
        return result

    def models(self) -> torch.nn.ModuleList:
        """Return the two models in training, transformer first."""
        return torch.nn.ModuleList([self.transformer, self.text])

    def loss(self, pool: Pool) -> torch.Tensor:
        """Compute the loss of one batch from a pool, some of its captions emptied."""
        latents, ids, mask = pool.draw(pool.size.batch)
        emptied = torch.rand(len(ids), 1, device=ids.device) < self.config.flow.caption_dropout
        ids = torch.where(emptied, self.empty_ids, ids)
        mask = torch.where(emptied, self.empty_mask, mask)
        embeds = encode_text(self.text, ids, mask, self.config.text.sequence_length)
        return flow_loss(self.transformer, embeds, latents, self.config.flow.shift)

    def step(self, pool: Pool) -> torch.Tensor:
        """Take one optimizer step and return the loss."""
        pool.advance()
        loss = self.loss(pool)
        loss.backward()
        runtime.average_gradients(self.parameters, self.process)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.ema.update()
        return loss.detach()

    def choose(self, order: random.Random, spent: float) -> Pool:
        """Choose the pool of a step; shares move linearly from their start to their end."""
        sizes = [pool.size for pool in self.pools]
        shares = [size.share + (size.end_share - size.share) * spent for size in sizes]
        return order.choices(self.pools, shares)[0]

    @torch.no_grad()
    def validate(self, bank: Path, batches: int = 4) -> float:
        """Return the averaged models' mean loss on held-out scenes, at fixed noise."""
        composer = Composer(Bank.load(bank, self.process.device), 999, held_out=True)
        size = self.pools[0].size
        pool = Pool(size, batches * size.batch, composer, self.vae, self.config)
        transformer, text = self.average
        losses = []
        torch.manual_seed(0)
        for _ in range(batches):
            pool.renew(size.batch)
            latents, ids, mask = pool.draw(size.batch)
            embeds = encode_text(text, ids, mask, self.config.text.sequence_length)
            losses.append(flow_loss(transformer, embeds, latents, self.config.flow.shift))
        return torch.stack(losses).mean().item()

    def run(self, budget: float, out: Path, *, compiled: bool) -> dict[str, float]:
        """Train until the budget is spent; compilation counts.

        Args:
            budget: Seconds.
            out: Folder for the weights, saved at every thousandth step.
            compiled: Compile the transformer's blocks, once a video size.

        Returns:
            Facts for the log.
        """
        settings = self.config.train_transformer
        clock, losses, step = runtime.Clock(self.process, budget), [], 0
        for pool in self.pools:
            pool.renew(4 * pool.size.fresh)
        if compiled:
            self.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        facts: dict[str, float] = {}
        order = random.Random(self.config.seed)  # the same in every process
        while (spent := clock.spent(step)) < 1:
            pool = self.choose(order, spent)
            runtime.set_learning_rate(
                self.optimizers, settings.learning_rate, step, settings.warmup, spent
            )
            loss = self.step(pool)
            if pool is self.pools[0]:
                losses.append(loss)
            step += 1
            if step % 200 == 0 or step in (20, 100):
                facts = self._facts(step, clock.seconds, losses)
                self.process.report(**facts)
            if step % 1000 == 0 and self.process.is_main:
                self.save(out, facts)
        return self._facts(step, clock.seconds, losses)

    @staticmethod
    def _facts(step: int, seconds: float, losses: list[torch.Tensor]) -> dict[str, float]:
        recent = torch.stack(losses[-200:]).mean().item()
        return {"steps": step, "seconds": round(seconds, 1), "loss": round(recent, 4)}

    def save(self, out: Path, facts: dict[str, float]) -> None:
        """Write the averaged weights, the transformer's with facts as metadata."""
        transformer, text = self.average
        runtime.save_weights(transformer, out / "transformer.safetensors", torch.float16, facts)
        runtime.save_weights(text, out / "text_encoder.safetensors", torch.float32)


def main() -> None:
    """Train, validate and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--vae", type=Path, required=True, help="folder that vae.py wrote to")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=500, help="seconds")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--config", type=Path, default=CONFIG_FILE)
    options = parser.parse_args()
    config = load(options.config)
    torch._dynamo.config.recompile_limit = 32
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with runtime.start() as process, sdpa_kernel(order, set_priority=True):
        trainer = Trainer(config, options.bank, options.vae, process)
        facts = trainer.run(options.budget, options.out, compiled=not options.no_compile)
        if process.is_main:
            facts["held_out_loss"] = round(trainer.validate(options.bank), 4)
            facts["processes"] = process.world
            process.report(**facts)
            trainer.save(options.out, facts)


if __name__ == "__main__":
    main()
