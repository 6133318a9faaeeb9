"""What both trainings share: processes, the time budget, averages, saving."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file


@dataclasses.dataclass(frozen=True)
class Process:
    """This process among those that ``torchrun`` started; alone without it."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process reports and saves."""
        return self.rank == 0

    def report(self, **facts: object) -> None:
        """Print one line of JSON from the main process."""
        if self.is_main:
            print(json.dumps(facts), flush=True)


@contextlib.contextmanager
def start() -> Iterator[Process]:
    """Join the process group if there is one, and leave it at the end."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Process(rank=rank, world=world, device=device)
    finally:
        if world > 1:
            dist.destroy_process_group()


def mixed_precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 on a GPU; on a CPU, where it only serves trials, do nothing."""
    on_gpu = device.type == "cuda"
    # No cache of cast weights: it would outlive the CUDA graphs that vae.py captures.
    return torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False)


class Clock:
    """Fraction of the time budget that is spent, the same number in every process.

    Args:
        process: This process.
        budget: Seconds.
        every: Steps between two looks at the main process's clock.
    """

    def __init__(self, process: Process, budget: float, every: int = 10) -> None:
        self._process, self._budget, self._every = process, budget, every
        self._start = time.monotonic()
        self._spent = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start, of this process."""
        return time.monotonic() - self._start

    def spent(self, step: int) -> float:
        """Return the fraction, looked up anew at every ``every``-th step."""
        if step % self._every == 0:
            spent = torch.tensor(self.seconds / self._budget, device=self._process.device)
            if self._process.world > 1:
                dist.broadcast(spent, 0)
            self._spent = spent.item()
        return self._spent


def average_gradients(parameters: Sequence[torch.nn.Parameter], process: Process) -> None:
    """Replace gradients by their mean over processes, in one message."""
    if process.world == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= process.world
    parts = flat.split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])


def set_learning_rate(
    optimizers: Iterable[torch.optim.Optimizer], peak: float, step: int, warmup: int, spent: float
) -> None:
    """Apply linear warm-up, then a cosine over the time budget down to 1% of the peak."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(spent, 1.0))
    rate = peak * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * cosine)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


class Average:
    """Exponential moving average of parameters, with a shorter memory in the first steps.

    Args:
        source: Parameters in training.
        target: Same-shaped parameters that hold the average.
        decay: Weight of the past.
    """

    def __init__(
        self,
        source: Iterable[torch.nn.Parameter],
        target: Iterable[torch.nn.Parameter],
        decay: float,
    ) -> None:
        self._source, self._target, self._decay = list(source), list(target), decay
        self._step = 0

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters."""
        decay = min(self._decay, (1 + self._step) / (10 + self._step))
        torch._foreach_lerp_(self._target, self._source, 1 - decay)
        self._step += 1


def save_weights(
    module: torch.nn.Module, path: Path, dtype: torch.dtype, metadata: dict[str, Any] | None = None
) -> None:
    """Write a module's weights as safetensors, tied weights once.

    Args:
        module: The module.
        path: Target file.
        dtype: Type of floating-point weights in the file.
        metadata: Facts stored as one JSON string beside the weights.
    """
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        weights[name] = tensor.detach().to("cpu", dtype).contiguous()
    facts = {"facts": json.dumps(metadata)} if metadata is not None else None
    save_file(weights, str(path), metadata=facts)
