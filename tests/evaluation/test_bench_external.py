"""Other libraries' kernels in `gossamer bench kernels`: what they are given, and their rows."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from gossamer.evaluation.bench import external, kernels
from gossamer.evaluation.bench.dense import DenseTimes
from gossamer.evaluation.bench.document import Run
from gossamer.evaluation.bench.random_rows import RandomRows
from gossamer.evaluation.bench.timing import Timing
from gossamer.plan import to_tokens

CPU = torch.device("cpu")
CASE = RandomRows(name="blocks", kind="blocks", num_tokens=900, heads=3, dim=64)
TIMING = Timing(median_ms=10.0, spread_ms=0.5, peak_extra_bytes=64)


def attend_as_the_mask_says(q, k, v, *, block_mask, enable_gqa):
    """Stand in for the compiled FlexAttention: blocks whole, as the mask lists them."""
    assert not enable_gqa
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
    seen = block_mask.to_dense().bool()
    seen = seen.repeat_interleave(128, dim=2).repeat_interleave(128, dim=3)
    seen = seen[:, :, : q.shape[2], : k.shape[2]]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.fixture
def run(monkeypatch):
    """Run the case with the clock and dense attention replaced; flex-attention is what is given."""
    dense = DenseTimes(name="cudnn", timing=TIMING, each=(("cudnn", TIMING),))
    monkeypatch.setattr(kernels, "fastest_dense", lambda *_, **__: dense)
    monkeypatch.setattr(kernels, "time_call", lambda call: call() is None or TIMING)

    def of(flex, **options):
        monkeypatch.setattr(external, "_flex_attention", lambda: flex)
        return kernels.bench_kernels(cases=[CASE], densities=(0.4,), run=Run(device=CPU), **options)

    return of


def test_flex_attention_gets_the_blocks_of_the_plan():
    plan = CASE.plan(0.4, CPU)
    mask = external.flex_mask(plan, (1, 3))
    assert torch.equal(mask.to_dense().bool(), plan.keys.to_mask(plan.num_keys))
    shared = replace(plan.keys, count=plan.keys.count[:, :1], index=plan.keys.index[:, :1])
    mask = external.flex_mask(replace(plan, keys=shared), (2, 3)).to_dense().bool()
    assert torch.equal(mask, shared.to_mask(plan.num_keys).expand(2, 3, -1, -1))


@pytest.mark.parametrize(
    "what",
    [{"causal": True}, {"key_valid": torch.ones(1, 900, dtype=torch.bool)}, {"window": (9, 9, 0)}],
    ids=["causal", "padded", "window"],
)
def test_plans_of_another_kind_are_not_for_it(what):
    plan = replace(CASE.plan(0.4, CPU), **what)
    assert external.flex_mask(plan, (1, 3)) is None
    q, k, v = CASE.tensors(CPU)
    assert external.external_kernels(q, k, v, plan) == {}
    assert external.flex_mask(to_tokens(CASE.plan(0.4, CPU)), (1, 3)) is None


def test_it_has_a_row_beside_those_of_our_kernels(run):
    document = run(attend_as_the_mask_says, kernels=["cpu", "flex-attention"])
    _, ours, flex = document["rows"]
    assert (ours["kernel"], flex["kernel"]) == ("cpu", "flex-attention")
    assert set(flex) == set(ours)
    assert flex["density"] == ours["density"]
    assert flex["rel_error"] < 0.02
    assert document["failures"] == []
    only_ours = run(attend_as_the_mask_says, kernels=["cpu"])
    assert [row["kernel"] for row in only_ours["rows"]] == ["cudnn", "cpu"]


@pytest.mark.parametrize("wrong", ["dense", "raises"])
def test_what_is_wrong_has_no_time(run, wrong):
    """The trap of FlexAttention: it attends densely where it is not compiled."""

    def attend(q, k, v, **_):
        if wrong == "raises":
            raise ValueError("NYI")
        return functional.scaled_dot_product_attention(q, k, v)

    document = run(attend, kernels=["flex-attention"])
    assert [row["kernel"] for row in document["rows"]] == ["cudnn"]
    (failure,) = document["failures"]
    assert failure["case"] == "blocks flex-attention"
    assert ("NYI" if wrong == "raises" else "relative error") in failure["failure"]
