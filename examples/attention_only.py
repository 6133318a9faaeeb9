"""Sparse attention on plain tensors: causal, grouped KV heads, no model and nothing but torch."""

import torch
from torch.nn import functional

import gossamer as gs


def clustered_tokens(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make q [1, 8, 1024, 64] and k, v [1, 2, 1024, 64] whose attention is concentrated.

    Each run of 64 tokens shares a topic out of 16, so that a query finds its keys in few blocks.
    """
    topics = torch.randn(16, 64, generator=generator)
    topic = torch.randint(16, (16,), generator=generator).repeat_interleave(64)
    noise = torch.randn(12, 1024, 64, generator=generator)
    q = 2 * topics[topic] + noise[:8]
    k = 2 * topics[topic] + noise[8:10]
    return q[None], k[None], noise[None, 10:]


def main() -> None:
    """Plan, look at the plan, run it, and measure the error against dense attention."""
    q, k, v = clustered_tokens(torch.Generator().manual_seed(0))
    dense = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    call = gs.Call(causal=True)

    # In one step, where only the output is wanted.
    out = gs.sparse_attention(q, k, v, gs.BlockTopK(density=0.25), call)
    print(f"output {tuple(out.shape)}")

    # In two, where the plan is of interest.
    for density in (0.25, 0.5, 1.0):
        plan = gs.get_method("block-topk", density=density, block=64).plan(q, k, v, call)
        plan.validate()
        out, _ = gs.attend(q, k, v, plan)
        error = (out - dense).norm() / dense.norm()
        print(f"density asked {density:4}, realised {plan.density:.3f}: error {error:.4f}")

    # The oracle computes the same plan in float64: what is left is the kernel's own rounding.
    exact, _ = gs.attend(q, k, v, plan, kernel="reference")
    print(f"kernel's own error {(out - exact).norm() / exact.norm():.1e}")
    for kernel, reasons in gs.explain_kernels(q, k, v, plan).items():
        print(f"kernel {kernel}: {'; '.join(reasons) or 'runs this'}")


if __name__ == "__main__":
    main()
