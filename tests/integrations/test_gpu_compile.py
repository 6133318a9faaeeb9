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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", ["hopper", "flash", "triton"])
@pytest.mark.parametrize("method", [gs.BlockTopK(density=0.4), gs.InstaGen(density=0.4)])
def test_a_wan_model_compiles_whole_with_every_kernel(
    method: gs.Method, kernel: str, backend: str
) -> None:
    if reason := missing(kernel):
        pytest.skip(reason)
    arguments: dict[str, Any] = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs(LATENT).items()
    }
    for name in ("hidden_states", "encoder_hidden_states"):
        arguments[name] = arguments[name].bfloat16()
    model = wan(num_layers=2, attention_head_dim=64).cuda().bfloat16()
    recipe = gs.Recipe(method=method, kernel=kernel, min_tokens=0)
    with gs.apply(model, recipe) as handle:
        want = run(model, arguments)
        model.compile(backend=backend, fullgraph=True)
        got = run(model, arguments)
        assert {record.kernel for record in handle.records} == {kernel}
        assert {record.path for record in handle.records} == {"sparse"}
    # Inductor adds in another order and keeps float32 where eager rounds; both end in bfloat16.
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < 2**-5
