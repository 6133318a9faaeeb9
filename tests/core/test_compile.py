"""Everything public traces into one graph on the first call."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.library import opcheck

import gossamer as gs
from cases import Options, Shape, random_plan
from gossamer.plan.flat import flatten
from gossamer.testing import method_at
from training import check_training


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", gs.list_methods())
def test_sparse_attention_compiles_whole(name: str) -> None:
    q, k, v = Shape(1, 2, 1, 130, 130, 64, 0).tensors()
    method = method_at(name, 0.5)
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: gs.sparse_attention(q, k, v, method), backend=counter, fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), gs.sparse_attention(q, k, v, method))
    compiled(q + 1, k, v)
    assert counter.frame_count == 1


def test_a_call_reaches_the_compiled_op() -> None:
    q, k, v = Shape(2, 2, 2, 130, 130, 16, 0).tensors()
    valid = torch.arange(130) < torch.tensor([[130], [70]])
    method = gs.InstaGen(density=0.5)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        call = gs.Call(
            layer=1,
            num_layers=4,
            step=2,
            num_steps=9,
            branch="cond",
            grid=(2, 5, 11),
            text=(0, 20),
            key_valid=valid,
            scale=0.3,
            head_offset=4,
            num_heads=8,
            seed=3,
        )
        return gs.sparse_attention(q, k, v, method, call)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, valid), run(q, k, v, valid))


def test_named_heads_reach_the_compiled_op() -> None:
    q, k, v = Shape(1, 4, 1, 130, 130, 16, 0).tensors()
    method = gs.InstaGen(density=0.3)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: gs.Call) -> torch.Tensor:
        return gs.sparse_attention(q, k, v, method, call)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for call in (gs.Call(heads=(7, 3, 1, 0)), gs.Call(heads=(0, 5, 2, 4)), gs.Call()):
        assert torch.equal(compiled(q, k, v, call), run(q, k, v, call))


def test_attend_compiles_whole() -> None:
    q, k, v = Shape(1, 2, 1, 130, 130, 64, 0).tensors()
    plan = gs.InstaGen(density=0.5).plan(q, k, v)
    compiled = torch.compile(
        lambda q, k, v: gs.attend(q, k, v, plan), backend="aot_eager", fullgraph=True
    )
    got, want = compiled(q, k, v), gs.attend(q, k, v, plan)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_varying_lengths_settle_after_a_few_compilations() -> None:
    counter = CompileCounter()
    method = gs.BlockTopK(density=0.5)
    compiled = torch.compile(
        lambda q: gs.sparse_attention(q, q, q, method), backend=counter, fullgraph=True
    )
    for length in (320, 256, 192, 128, 130):
        compiled(torch.randn(1, 1, length, 16))
    assert counter.frame_count <= 3


def test_two_methods_in_one_process_stay_apart() -> None:
    q, k, v = Shape(1, 2, 1, 130, 130, 16, 0).tensors()
    outs = []
    for density in (0.3, 0.9):
        method = gs.InstaGen(density=density)
        compiled = torch.compile(
            lambda q, k, v, method=method: gs.sparse_attention(q, k, v, method), backend="eager"
        )
        outs.append(compiled(q, k, v))
        assert torch.equal(outs[-1], gs.sparse_attention(q, k, v, method))
    assert not torch.equal(*outs)


SHAPE = Shape(2, 2, 2, 75, 75, 16, 3)
PLAIN = Options(True, False, False, False, 0, None, False, False, 32, 0.6)
PLANS = {
    "blocks": PLAIN,
    "permuted": replace(PLAIN, permuted=True, padded=True),
    "tokens": replace(PLAIN, blocks=False, weighted=True, virtual=3),
}


@pytest.mark.parametrize(
    ("kernel", "kind"), [("auto", "blocks"), ("auto", "permuted"), ("reference", "tokens")]
)
def test_a_block_trains_in_one_graph(kernel: str, kind: str) -> None:
    check_training(SHAPE, random_plan(SHAPE, PLANS[kind]), kernel)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_gradients_through_inductor() -> None:
    """The op alone, of strided inputs: nothing is left to compile by a C++ compiler."""
    plan = random_plan(SHAPE, PLANS["blocks"])

    def run(*tensors: torch.Tensor) -> gs.AttentionOutput:
        return gs.attend(*(x.transpose(1, 2) for x in tensors), plan)

    beside = [x.transpose(1, 2).contiguous().requires_grad_() for x in SHAPE.tensors()]
    grads = []
    for call in (run, torch.compile(run, backend="inductor", fullgraph=True)):
        out, lse = call(*beside)
        outputs = (out, lse.masked_fill(lse == -torch.inf, 0.0))
        grads.append(torch.autograd.grad(sum(x.square().sum() for x in outputs), beside))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("wanted", "of"), [("q", "out"), ("v", "out"), ("kv", "out"), ("q", "lse"), ("qk", "lse")]
)
def test_gradients_of_one_output_by_some_inputs(wanted: str, of: str) -> None:
    plan = random_plan(SHAPE, PLANS["blocks"])

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return getattr(gs.attend(q, k, v, plan), of).exp().sum()

    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    tensors = dict(zip("qkv", SHAPE.tensors(), strict=True))
    leaves = [tensors[name].requires_grad_() for name in wanted]
    want, got = (torch.autograd.grad(call(*tensors.values()), leaves) for call in (run, whole))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_training_at_varying_lengths_settles_after_a_few_compilations() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gs.attend, backend=counter, fullgraph=True)
    for length in (75, 80, 90, 64):
        shape = replace(SHAPE, num_queries=length, num_keys=length + 3)
        plan = random_plan(shape, PLANS["blocks"])
        grads = []
        for call in (gs.attend, compiled):
            leaves = [x.requires_grad_() for x in shape.tensors()]
            grads.append(torch.autograd.grad(call(*leaves, plan).out.sum(), leaves))
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 3


def test_a_kernel_without_gradients_refuses_in_a_graph_as_outside() -> None:
    plan = random_plan(SHAPE, PLANS["blocks"])
    compiled = torch.compile(
        lambda q, k, v: gs.attend(q, k, v, plan, kernel="cpu"), backend="aot_eager", fullgraph=True
    )
    q, k, v = SHAPE.tensors()
    compiled(q, k, v)
    with torch.no_grad():
        compiled(q.requires_grad_(), k, v)
    with pytest.raises(gs.UnsupportedError, match="kernel 'cpu' cannot run this: inference only"):
        compiled(q, k, v)


ops = torch.ops.gossamer
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


def test_the_ops_pass_torchs_own_checks() -> None:
    q, k, v = SHAPE.tensors()
    rest = (*flatten(random_plan(SHAPE, PLANS["permuted"])), 0.25)
    opcheck(ops.attend.default, (q, k, v, *rest, "auto", False), test_utils=CHECKS)
    out, lse = ops.attend(q, k, v, *rest, "reference", False)
    for of_keys in (False, True):
        arguments = (q, k, v, out, lse, out, lse, *rest, "reference", of_keys)
        opcheck(ops.attend_backward.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("full", [False, True])
def test_the_ops_gradients_pass_torchs_own_checks(full: bool) -> None:
    """Of a plan that has every tensor too: torch takes a list without None apart."""
    plan = random_plan(SHAPE, PLANS["permuted"])
    if full:
        order = torch.arange(plan.num_tiles, dtype=torch.int32).view(1, 1, -1)
        plan = replace(plan, launch_order=order)
    tensors, numbers = flatten(plan)
    assert any(x is None for x in tensors) != full
    leaves = [x.requires_grad_() for x in SHAPE.tensors()]
    arguments = (*leaves, tensors, numbers, 0.25, "reference", True)
    opcheck(ops.attend.default, arguments, test_utils=CHECKS)
