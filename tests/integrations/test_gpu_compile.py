"""On a GPU: a Wan model in one graph with every kernel, against its own eager run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.kernels.flash import unavailable
from integrations.wan_models import inputs, run, wan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # flash-attn-4 and inductor warn of themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LATENT = (5, 24, 20)  # 600 tokens: five tiles, the last ragged


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def missing(kernel: str) -> str | None:
    """Return why a kernel does not run on this GPU."""
    if kernel == "flash":
        return "; ".join(unavailable(torch.device("cuda"))) or None
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    return None


# Plans that no rounding of queries or keys can change: a band of blocks, groups of single keys.
METHODS = [gs.get_method("sliding-window", density=0.4), gs.Intra(groups=4)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", ["hopper", "flash", "triton"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_wan_model_compiles_whole_with_every_kernel(
    method: gs.Method, kernel: str, backend: str
) -> None:
    if reason := missing(kernel):
        pytest.skip(reason)
    check(method, kernel, backend, "cuda")


def check(method: gs.Method, kernel: str, backend: str, device: str) -> None:
    """Hold the compiled model to the eager one, and that to itself in float32."""
    exact: dict[str, Any] = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in inputs(LATENT).items()
    }
    rounded = {
        name: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in exact.items()
    }
    model = wan(num_layers=2, attention_head_dim=64).to(device)
    with gs.apply(model, gs.Recipe(method=method, kernel="reference", min_tokens=0)):
        want = run(model, exact)
    model = model.bfloat16()
    with gs.apply(model, gs.Recipe(method=method, kernel=kernel, min_tokens=0)) as handle:
        eager = run(model, rounded).float()
        model.compile(backend=backend, fullgraph=True)
        got = run(model, rounded).float()
        assert {record.kernel for record in handle.records} == {kernel}
        assert {record.path for record in handle.records} == {"sparse"}
    # Fused operations round elsewhere: both outputs are as far from float32 as bfloat16 is, and
    # from one another at most twice that.
    rounding = (eager - want).norm()
    assert rounding > 0
    assert (got - want).norm() <= 2 * rounding
    assert (got - eager).norm() <= 2 * rounding
