"""torch.compile: whole graphs, and none more for another step, pass, schedule or layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import gossamer as gs
from integrations.wan_models import full, i2v_inputs, inputs, run, snapshot, sparse, wan, wan_i2v


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountingBackend:
    """AOT autograd over eager execution, which counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls_op = 0

        def compile_graph(module: torch.fx.GraphModule, _inputs: Any) -> Any:
            self.graphs += 1
            targets = [str(node.target) for node in module.graph.nodes]
            self.calls_op += targets.count("gossamer.session_attention.default")
            return make_boxed_func(module.forward)

        self.compiler = aot_autograd(fw_compiler=compile_graph)

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return self.compiler(module, example_inputs)


def compile_whole(model: Any, backend: Any) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def compile_wrapped(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def compile_blocks(model: Any, backend: Any) -> Any:
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    return model


Compile = Callable[[Any, Any], Any]
WAYS = [compile_whole, compile_wrapped, compile_blocks]


def steps(model: Any, arguments: dict[str, Any], count: int = 3) -> list[torch.Tensor]:
    """Run some steps of two passes."""
    outputs = []
    for step in range(count):
        for branch in ("cond", "uncond"):
            with model.cache_context(branch, step_index=step, num_inference_steps=count):
                outputs.append(run(model, arguments))
    return outputs


@pytest.mark.parametrize("way", WAYS)
def test_steps_passes_and_the_schedule_share_their_graphs(way: Compile) -> None:
    recipe = sparse(dense_steps=1, dense_layers="1")
    model = wan(num_layers=2)
    with gs.apply(model, recipe) as handle:
        expected = steps(model, inputs())
        paths = [(r.layer, r.step, r.branch, r.path) for r in handle.records]
    assert {path for *_, path in paths} == {"dense", "sparse"}
    backend = CountingBackend()
    with gs.apply(model, recipe) as handle:
        compiled = way(model, backend)
        with compiled.cache_context("cond", step_index=0, num_inference_steps=3):
            run(compiled, inputs())
        first = backend.graphs
        assert backend.calls_op == (1 if way is compile_blocks else 2)
        for got, want in zip(steps(compiled, inputs()), expected, strict=True):
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
        assert backend.graphs == first
        assert [(r.layer, r.step, r.branch, r.path) for r in handle.records] == paths


@pytest.mark.parametrize("way", [compile_whole, compile_blocks])
def test_a_new_resolution_costs_one_compilation_and_further_ones_none(way: Compile) -> None:
    model, eager = wan(num_layers=1), wan(num_layers=1)
    backend = CountingBackend()
    with gs.apply(model, sparse()) as handle, gs.apply(eager, sparse()):
        compiled = way(model, backend)
        counts = []
        for latent in ((4, 8, 10), (3, 6, 14), (5, 4, 8), (4, 8, 10)):
            got = run(compiled, inputs(latent))
            counts.append(backend.graphs)
            assert handle.records[0].num_queries == latent[0] * latent[1] * latent[2] // 4
            torch.testing.assert_close(got, run(eager, inputs(latent)), atol=2e-6, rtol=2e-5)
    once = 1 if way is compile_blocks else 2  # the hook that reads the grid is a graph of its own
    assert counts == [once, *[2 * once] * 3]


@pytest.mark.parametrize("way", WAYS)
def test_attaching_to_a_compiled_model_and_removing(way: Compile) -> None:
    model = wan(num_layers=2)
    compiled = way(model, CountingBackend())
    dense = run(compiled, inputs())
    before = snapshot(model)
    with gs.apply(compiled, full()) as handle:
        torch.testing.assert_close(run(compiled, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert [r.layer for r in handle.records] == [0, 1]
    assert torch.equal(run(compiled, inputs()), dense)
    assert snapshot(model) == before
    with gs.apply(compiled, sparse()) as again:
        assert not torch.equal(run(compiled, inputs()), dense)
        assert [r.path for r in again.records] == ["sparse"] * 2
    assert len(handle.records) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_backend_set_after_attaching_is_noticed_in_compiled_models(way: Compile) -> None:
    model = wan(num_layers=1)
    with gs.apply(model, sparse()):
        compiled = way(model, CountingBackend())
        steps(compiled, inputs(), count=1)
        model.blocks[0].attn1.set_attention_backend("native")
        with pytest.raises(gs.UnsupportedError, match=r"backend of blocks\.0\.attn1 was set to"):
            steps(compiled, inputs(), count=1)


def test_image_to_video_blocks() -> None:
    model = wan_i2v()
    dense = run(model, i2v_inputs())
    backend = CountingBackend()
    with gs.apply(model, full()):
        compile_blocks(model, backend)
        torch.testing.assert_close(run(model, i2v_inputs()), dense, atol=2e-6, rtol=2e-5)
    assert backend.graphs == 1


def test_a_users_shared_processor_in_one_graph() -> None:
    model = wan()
    model.set_attn_processor(model.blocks[0].attn1.processor)
    dense = run(model, inputs())
    backend = CountingBackend()
    with gs.apply(model, full()) as handle:
        compile_blocks(model, backend)
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert [r.layer for r in handle.records] == [0, 1, 2]
    assert backend.graphs == 1


def test_the_operator_agrees_with_its_fake() -> None:
    from gossamer.integrations.diffusers.backend import session_attention
    from gossamer.integrations.diffusers.sites import SITE_ATTRIBUTE

    model = wan(num_layers=1)
    with gs.apply(model, sparse()):
        site = getattr(model.blocks[0].attn1, SITE_ATTRIBUTE)
        q, k, v = torch.randn(3, 2, 80, 2, 12)
        grid = torch.tensor((4, 4, 5))
        for mask in (None, torch.ones(2, 1, 1, 80, dtype=torch.bool), torch.zeros(80, 80)):
            torch.library.opcheck(
                session_attention,
                (q, k, v, mask, False, 0.2, site, grid),
                test_utils=("test_schema", "test_faketensor"),
            )
    assert torch.Tag.cudagraph_unsafe in torch.ops.gossamer.session_attention.default.tags
