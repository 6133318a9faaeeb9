"""The CPU kernel on full causal plans, which run through torch's causal kernel as a whole."""

from dataclasses import replace

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.kernels import cpu
from gossamer.plan import to_tokens
from oracle import assert_matches, tolerance

SIZES = [(1, 1), (257, 257), (40, 300), (300, 40), (1, 129), (129, 1)]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a plan is run one head after another."""

    def refuse(*_: object) -> None:
        raise AssertionError("the plan was not run as a whole")

    monkeypatch.setattr(cpu, "_run_head", refuse)


def padding(shape: Shape) -> torch.Tensor:
    """Return [B, S] with padding in front, behind and in between; one row is padding alone."""
    valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.7
    valid[0, : shape.num_keys // 3] = False
    valid[1] = False
    return valid


def check(tensors: tuple[torch.Tensor, ...], plan: gs.SparsePlan, scale: float | None) -> None:
    """Compare output and log-sum-exp with the reference's."""
    q, k, v = tensors
    got = gs.attend(q, k, v, plan, scale=scale, kernel="cpu")
    double = [x.double() for x in tensors]
    want = gs.attend(*double, plan, scale=scale, kernel="reference")
    assert (got.out.dtype, got.lse.dtype) == (q.dtype, torch.float32)
    finite = [x.nan_to_num() for x in tensors]
    assert_matches(got, want, tolerance(*finite, scale=scale))


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), SIZES)
def test_it_equals_the_reference(
    num_queries: int, num_keys: int, padded: bool, dtype: torch.dtype
) -> None:
    """Rows that see nothing too: queries in front of the keys, or before the first valid key."""
    shape = Shape(3, 2, 2, num_queries, num_keys, 16, 3)
    q, k, v = shape.tensors(dtype)
    valid = padding(shape) if padded else None
    plan = gs.Dense().plan(q, k, v, gs.Call(causal=True, key_valid=valid))
    check((q, k, v), plan, None)
    out, lse = gs.attend(q, k, v, plan, kernel="cpu")
    blind = num_queries - num_keys
    if blind > 0:
        assert (out[:, :, :blind] == 0).all()
        assert (lse[:, :, :blind] == -torch.inf).all()
    if padded:
        assert (out[1] == 0).all()
        assert (lse[1] == -torch.inf).all()


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.7])
def test_any_scale(scale: float) -> None:
    """Torch's kernel masks before it scales, so that a factor below 0 needs its sign turned."""
    tensors = Shape(1, 1, 2, 60, 90, 16, 5).tensors()
    check(tensors, gs.Dense().plan(*tensors, gs.Call(causal=True, scale=scale)), scale)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_padding_may_hold_anything(broken: float) -> None:
    shape = Shape(2, 1, 2, 130, 130, 16, 6)
    q, k, v = shape.tensors()
    valid = torch.arange(130) < torch.tensor([[130], [90]])
    plan = gs.Dense().plan(q, k, v, gs.Call(causal=True, key_valid=valid))
    want = gs.attend(q, k, v, plan, kernel="cpu")
    k, v = (x.masked_fill(~valid[:, None, :, None], broken) for x in (k, v))
    got = gs.attend(q, k, v, plan, kernel="cpu")
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_a_nan_reaches_exactly_the_queries_that_see_it() -> None:
    q, k, v = Shape(1, 1, 1, 100, 100, 16, 7).tensors()
    v[0, 0, 37] = torch.nan
    plan = gs.Dense().plan(q, k, v, gs.Call(causal=True))
    out = gs.attend(q, k, v, plan, kernel="cpu").out[0, 0]
    assert out[:37].isfinite().all()
    assert out[37:].isnan().all()


@pytest.mark.usefixtures("whole")
def test_blocks_that_are_all_read_run_as_a_whole_too() -> None:
    tensors = Shape(1, 1, 2, 100, 100, 16, 8).tensors()
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    keys = gs.KeyBlocks.from_mask(mask, block=32)
    plan = gs.SparsePlan(num_queries=100, num_keys=100, tile=32, keys=keys, causal=True)
    check(tensors, plan, None)
    check(tensors, to_tokens(plan), None)


def test_what_is_less_than_full_does_not() -> None:
    """Weights, a window, a missing key and left-out queries stay what the plan says."""
    tensors = Shape(1, 1, 1, 100, 100, 16, 9).tensors()
    full = gs.Dense().plan(*tensors, gs.Call(causal=True))
    weights = torch.linspace(-1, 1, 100)
    fewer = torch.arange(99, dtype=torch.int32).view(1, 1, 1, -1)
    index = torch.full((1, 1, 1, 128), -1, dtype=torch.int32)
    index[..., :50] = torch.arange(50)
    for plan in (
        replace(full, keys=replace(full.keys, log_weight=weights)),
        replace(full, window=(10, -1, 0)),
        replace(full, keys=gs.KeyTokens.from_lists(fewer)),
        replace(full, query_index=index),
    ):
        check(tensors, plan, None)
