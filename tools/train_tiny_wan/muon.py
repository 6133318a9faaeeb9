"""Muon for many small matrices: one orthogonalisation a shape instead of one a matrix."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Odd quintic that drives singular values towards 1 (Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
UPDATE_RMS = 0.4  # of the learning rate; AdamW's updates have about 0.2 to 0.4


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Replace matrices ``[N, R, C]`` by about the nearest ones with orthonormal rows or columns."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised updates of a fixed root mean square.

    Args:
        params: Matrices; those of one shape are stacked.
        lr: Learning rate, on AdamW's scale.
        momentum: Weight of the past gradients, applied in Nesterov's form.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in params:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        super().__init__([{"params": group} for group in by_shape.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient; all of a shape have one or none has."""
        del closure
        for group in self.param_groups:
            params = group["params"]
            gradient = torch.stack([p.grad for p in params])  # [N, R, C]
            state = self.state[params[0]]
            past = state.setdefault("momentum", torch.zeros_like(gradient))
            past.lerp_(gradient, 1 - group["momentum"])
            update = orthogonalise(gradient.lerp_(past, group["momentum"])).float()
            update *= UPDATE_RMS * max(gradient.shape[1:]) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"])
