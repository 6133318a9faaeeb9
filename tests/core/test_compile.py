"""Everything public traces into one graph on the first call."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import gossamer as gs
from cases import Shape


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", gs.list_methods())
def test_sparse_attention_compiles_whole(name: str) -> None:
    q, k, v = Shape(1, 2, 1, 130, 130, 64, 0).tensors()
    method = gs.get_method(name, density=0.5)
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


def test_the_ops_pass_torchs_own_checks() -> None:
    from gossamer.plan.flat import flatten

    q, k, v = Shape(1, 2, 1, 40, 40, 16, 0).tensors()
    tensors, numbers = flatten(gs.InstaGen(density=0.5).plan(q, k, v))
    torch.library.opcheck(
        torch.ops.gossamer.attend.default,
        (q, k, v, tensors, numbers, 0.25, "auto"),
        test_utils=("test_schema", "test_faketensor"),
    )
