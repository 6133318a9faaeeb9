"""A small block that trains through a plan: eager and compiled must give the same gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gossamer as gs
from cases import Shape

__all__ = ["Block", "check_training"]


class Block(nn.Module):
    """Attention by a fixed plan, between linear maps."""

    def __init__(self, shape: Shape, plan: gs.SparsePlan, kernel: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.dim
        width = self.heads * self.dim
        self.project = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim)
        self.join = nn.Linear(width, width)
        self.plan, self.kernel = plan, kernel

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [B, N, H * D] and the log-sum-exp [B, H, N]."""
        projected = self.project(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        out, lse = gs.attend(q, k, v, self.plan, kernel=self.kernel)
        return self.join(out.transpose(1, 2).flatten(2)), lse


def check_training(
    shape: Shape,
    plan: gs.SparsePlan,
    kernel: str,
    *,
    backend: str = "aot_eager",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float = 0.0,
) -> None:
    """Train one step eagerly and compiled whole; hold all gradients to one another.

    Args:
        shape: The sizes; as many queries as keys.
        plan: The plan.
        kernel: The kernel.
        backend: The compiler's backend.
        dtype: That of the block.
        device: Where it runs.
        tolerance: Largest norm of a difference, relative to what it is of. 0 for the same bits.
    """
    torch.manual_seed(shape.seed)
    model = Block(shape, plan.to(device), kernel).to(device, dtype)
    x = torch.randn(shape.batch, shape.num_queries, shape.heads * shape.dim).to(device, dtype)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    want, got = (_gradients(model, call, x) for call in (model, compiled))
    for name, a in got.items():
        error = (a - want[name]).norm().item()
        most = tolerance * want[name].norm().item()
        assert error <= most, f"{name} differs by {error:.3g}, allowed {most:.3g}"
        assert a.norm() > 0, f"{name} is 0"


def _gradients(model: Block, call: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the loss and the gradients of one step in float64."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out, lse = call(leaf)
    loss = out.float().square().mean() + lse.masked_fill(lse == -torch.inf, 0.0).sin().mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()} | {"x": leaf.grad, "loss": loss}
    return {name: grad.detach().double() for name, grad in grads.items()}
