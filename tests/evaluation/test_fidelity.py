"""Attention-level error: metrics against brute force, bias, resuming, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import gossamer as gs
import oracle
from gossamer.evaluation import fidelity as module
from gossamer.evaluation.captures import Capture, CaptureInfo, Triple
from gossamer.evaluation.exact import (
    PlanRows,
    coverage,
    dense_reference,
    row_entropy,
    sample_rows,
)
from gossamer.evaluation.fidelity import (
    RESULTS,
    Fidelity,
    FidelityError,
    choose_variants,
    measure,
)
from gossamer.evaluation.structured import structured_set
from gossamer.evaluation.variants import NAMED_VARIANTS, Variant
from gossamer.methods.base import Method

GRID = (2, 8, 8)
CPU = torch.device("cpu")


def tensors(heads=2, tokens=96, dim=16, kv_heads=None, seed=0, sharp=2.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, tokens, dim)] + 2 * [(kv_heads or heads, tokens, dim)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return Triple(sharp * q, k, v)


def capture_of(calls, **info):
    return Capture.from_tensors(CaptureInfo(model="m", **info), calls)


def variant(method, name=None):
    return Variant(
        name=name or method.name, recipe=gs.Recipe(method=method), density_asked=method.density
    )


def topk(density=0.25):
    return variant(gs.BlockTopK(density=density, block=16, tile=16))


def sampler(density=0.5):
    """A sample of the keys, from few clusters so that every one is large."""
    method = gs.InstaGen(exact=0.0, sampled=density, sampler="uniform", query_clusters=2)
    return Variant(name="sampler", recipe=gs.Recipe(method=method), density_asked=density)


def one_input(**changes):
    return {"heads": capture_of({(0, 0, ""): tensors(**changes)})}


def run(tmp_path, *variants, inputs=None, **more):
    spec = Fidelity(inputs=inputs or one_input(), variants=variants, **more)
    return measure(spec, tmp_path)


@dataclass(frozen=True, kw_only=True)
class Spy(Method):
    """Block top-k that says which calls it planned, and refuses head dims as it is told."""

    name: ClassVar[str] = "spy"
    density: float = 0.5
    refused_dim: int = 0
    calls: ClassVar[list[tuple[int, int, int, int]]] = []

    def _plan_latent(self, q, k, v, call, state):
        if q.shape[-1] == self.refused_dim:
            raise gs.UnsupportedError("not with this head dim")
        state["seen"] = state.get("seen", 0) + 1
        Spy.calls.append((call.seed, call.layer, call.step, state["seen"]))
        method = gs.BlockTopK(density=self.density, block=16, tile=16)
        return method._plan_latent(q, k, v, call, None)

    @classmethod
    def at_density(cls, density, **params):
        return cls(density=density, **params)


@pytest.fixture
def spied():
    Spy.calls.clear()
    return Spy.calls


# The exact side: dense attention, rows of plans, distributions.


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_the_dense_reference_is_the_textbooks(kv_heads, scale):
    q, k, v = tensors(heads=4, kv_heads=kv_heads)
    exact = oracle.attention(q[None], k[None], v[None], scale=scale).out[0]
    got = dense_reference(q, k, v, scale=scale)
    assert torch.equal(got.out, exact.float())
    factor = 16**-0.5 if scale is None else scale
    p = (q.double() @ k.repeat_interleave(4 // kv_heads, 0).double().mT * factor).softmax(-1)
    assert torch.allclose(got.entropy, -(p * p.log()).sum(-1).mean(-1))


def test_the_dense_reference_does_not_depend_on_its_chunks(monkeypatch):
    q, k, v = tensors(tokens=100)
    whole = dense_reference(q, k, v, scale=None)
    monkeypatch.setattr("gossamer.evaluation.exact._CHUNK_BYTES", 8 * 100 * 7)
    parts = dense_reference(q, k, v, scale=None)
    assert torch.allclose(parts.out, whole.out, rtol=1e-6, atol=1e-7)
    assert torch.allclose(parts.entropy, whole.entropy)


def test_the_entropy_of_even_and_of_certain_rows():
    logits = torch.tensor([[1.0] * 8, [0.0] + [-2000.0] * 7], dtype=torch.float64)
    assert row_entropy(logits).tolist() == pytest.approx([math.log(8), 0.0], abs=1e-12)


@pytest.mark.parametrize(("num_queries", "count"), [(100, 7), (1000, 256), (8, 8), (5, 9), (1, 4)])
def test_sampled_rows_lie_one_in_each_stratum(num_queries, count):
    rows = sample_rows(num_queries, count, device=CPU)
    kept = min(count, num_queries)
    bound = [stratum * num_queries // kept for stratum in range(kept + 1)]
    assert len(rows) == kept
    assert all(bound[i] <= row < bound[i + 1] for i, row in enumerate(rows.tolist()))
    assert torch.equal(rows, sample_rows(num_queries, count, device=CPU))
    if count >= num_queries:
        assert rows.tolist() == list(range(num_queries))


def virtual_plan(*, named=True):
    """8 queries in 2 tiles, 8 keys, 2 virtual keys that stand for keys 4-5 and 6-7."""
    generator = torch.Generator().manual_seed(5)
    extra = torch.randn(2, 1, 1, 2, 16, generator=generator)
    owner = torch.tensor([-1, -1, -1, -1, 0, 0, 1, 1], dtype=torch.int32).view(1, 1, 8)
    return gs.SparsePlan(
        num_queries=8,
        num_keys=8,
        tile=4,
        keys=gs.KeyTokens(
            start=torch.tensor([0, 5]).view(1, 1, 2),
            count=torch.tensor([5, 3], dtype=torch.int32).view(1, 1, 2),
            index=torch.tensor([0, 1, 4, 8, 9, 2, 3, 9], dtype=torch.int32),
            log_weight=torch.tensor([1.0, 2, 1, 2, 2, 1, 1, 2]).log(),
            extra_k=extra[0],
            extra_v=extra[1],
            extra_of=owner if named else None,
        ),
    )


def plans(q, k, v):
    """Plans of every kind for one call."""
    batch = [x[None] for x in (q, k, v)]
    yield gs.BlockTopK(density=0.3, block=16, tile=16).plan(*batch)
    yield gs.SVG2(density=0.3).plan(*batch)
    yield gs.InstaGen(density=0.3).plan(*batch)
    yield gs.SparsePlan(
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        tile=16,
        keys=gs.Dense().plan(*batch).keys,
        tile_row=torch.zeros(1, 1, -(-q.shape[1] // 16), dtype=torch.int32),
        window=(9, 3, 2),
    )


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_rows_of_a_plan_are_those_of_its_weights(kv_heads):
    q, k, v = tensors(kv_heads=kv_heads)
    rows = torch.tensor([0, 5, 31, 32, 95])
    for plan in plans(q, k, v):
        expected = plan.weights()[0, :, rows].expand(2, -1, -1)
        assert torch.allclose(PlanRows(plan, 2).weights(rows), expected.double())
    plan = virtual_plan()
    got = PlanRows(plan, 2).weights(torch.arange(8))
    assert torch.allclose(got, plan.weights()[0].double().expand(2, -1, -1))


def brute_distributions(q, k, plan):
    """P and the plan's distribution over the real keys, by definition, pair by pair."""
    heads, scale = q.shape[0], q.shape[-1] ** -0.5
    group = heads // k.shape[0]
    weights = plan.weights()[0].double().expand(heads, -1, -1)
    num_keys = plan.num_keys
    extra = getattr(plan.keys, "extra_k", None)
    dense = torch.zeros(heads, plan.num_queries, num_keys, dtype=torch.float64)
    read = torch.zeros_like(dense)
    for h in range(heads):
        keys = k[h // group].double()
        if extra is not None:
            keys = torch.cat([keys, extra[0, h // group if extra.shape[1] > 1 else 0].double()])
        for i in range(plan.num_queries):
            e = (keys @ q[h, i].double() * scale).exp()
            dense[h, i] = e[:num_keys] / e[:num_keys].sum()
            share = weights[h, i] * e / (weights[h, i] * e).sum()
            read[h, i] = share[:num_keys]
            owner = getattr(plan.keys, "extra_of", None)
            for j in range(num_keys):
                if owner is not None and owner[0, 0, j] >= 0:
                    members = (owner[0, 0] == owner[0, 0, j]).sum()
                    read[h, i, j] += share[num_keys + owner[0, 0, j]] / members
    return dense, read, weights[..., :num_keys]


def check_coverage(q, k, plan):
    dense, read, weights = brute_distributions(q, k, plan)
    mass = (dense * (weights > 0)).sum(-1).mean(-1)
    overlap = (dense * read).sqrt().sum(-1).clamp(max=1)
    got = coverage(q, k, plan, torch.arange(plan.num_queries))
    assert torch.allclose(got.mass, mass, rtol=1e-9)
    # Rounding of the overlap, about 1e-16, is 1e-8 in its root.
    assert torch.allclose(got.hellinger, (1 - overlap).sqrt().mean(-1), rtol=1e-7, atol=1e-7)
    return got


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_mass_and_hellinger_are_those_of_the_definition(kv_heads):
    q, k, v = tensors(tokens=48, kv_heads=kv_heads)
    for plan in plans(q, k, v):
        check_coverage(q, k, plan)


@pytest.mark.parametrize("named", [True, False])
def test_virtual_keys_count_for_the_keys_they_stand_for(named):
    q, k, _ = tensors(heads=1, tokens=8)
    check_coverage(q, k, virtual_plan(named=named))


def test_naming_the_keys_of_virtual_keys_brings_the_distributions_nearer():
    q, k, _ = tensors(heads=1, tokens=8)
    rows = torch.arange(8)
    named, unnamed = (coverage(q, k, virtual_plan(named=name), rows) for name in (True, False))
    assert named.hellinger < unnamed.hellinger
    assert named.mass == unnamed.mass


def test_coverage_does_not_depend_on_its_chunks(monkeypatch):
    q, k, v = tensors(tokens=48)
    for plan in plans(q, k, v):
        whole = coverage(q, k, plan, torch.arange(48))
        monkeypatch.setattr("gossamer.evaluation.exact._CHUNK_BYTES", 8 * 2 * 48 * 5)
        parts = coverage(q, k, plan, torch.arange(48))
        monkeypatch.undo()
        assert torch.allclose(parts.mass, whole.mass)
        assert torch.allclose(parts.hellinger, whole.hellinger)


def test_a_full_plan_covers_everything():
    q, k, v = (x[None] for x in tensors())
    covered = coverage(q[0], k[0], gs.Dense().plan(q, k, v), torch.arange(96))
    assert covered.mass.tolist() == [1.0, 1.0]
    assert covered.hellinger.tolist() == [0.0, 0.0]


# The measurement.


def test_a_row_holds_the_errors_of_the_definition(tmp_path):
    document = run(tmp_path, topk(), seeds=2)
    (row,) = document["rows"]
    q, k, v = (x[None] for x in tensors())
    method = gs.BlockTopK(density=0.25, block=16, tile=16)
    plan = method.plan(q, k, v)
    dense = oracle.attention(q, k, v).out
    out = gs.attend(q, k, v, plan, kernel="reference").out
    errors = (out - dense).norm(dim=(2, 3)) / dense.norm(dim=(2, 3))
    assert row["rel_l2_heads"] == pytest.approx(errors[0].tolist(), rel=1e-4)
    assert row["rel_l2"] == pytest.approx(errors.mean().item(), rel=1e-4)
    assert row["rel_l2_median"] == pytest.approx(errors.mean().item(), rel=1e-4)  # of two heads
    assert row["rel_l2_max"] == pytest.approx(errors.max().item(), rel=1e-4)
    assert row["density"] == plan.density
    p, _, weights = brute_distributions(q[0], k[0], plan)
    mass = (p * (weights > 0)).sum(-1)
    assert row["mass"] == pytest.approx(mass.mean().item())
    assert row["hellinger"] == pytest.approx((1 - mass.sqrt()).sqrt().mean().item())
    assert (row["input"], row["method"], row["density_asked"]) == ("heads", "block-topk", 0.25)
    assert (row["seeds"], row["heads"], row["calls"]) == (2, 2, 1)


def test_the_document_is_the_file_and_names_its_inputs(tmp_path):
    document = run(tmp_path, topk(), seeds=1)
    assert json.loads((tmp_path / RESULTS).read_text()) == document
    fixed = {"input", "method", "density_asked", "density", "rel_l2", "hellinger", "mass", "seeds"}
    assert fixed | {"rel_l2_median", "bias", "heads"} <= set(document["rows"][0])
    (source,) = document["inputs"]
    q, k, _ = tensors()
    shares = row_entropy((q @ k.mT / 4).double().flatten(0, 1)).view(2, -1).mean(-1) / math.log(96)
    assert source["entropy_heads"] == pytest.approx(shares.tolist(), rel=1e-5)
    assert source["heads"] == ["l0.h0", "l0.h1"]
    assert (source["tokens"], source["head_dim"], source["calls"]) == (96, 16, 1)
    assert "torch" in document["environment"]


def test_dense_attention_has_no_error(tmp_path):
    (row,) = run(tmp_path, *choose_variants(["dense"]), seeds=2)["rows"]
    assert row["rel_l2"] < 1e-5
    assert (row["mass"], row["hellinger"], row["density"]) == (1.0, 0.0, 1.0)


def test_half_precision_captures_are_computed_in_float32(tmp_path):
    half = Triple(*(x.half() for x in tensors()))
    inputs = {"heads": capture_of({(0, 0, ""): half})}
    (row,) = run(tmp_path, *choose_variants(["dense"]), inputs=inputs, seeds=1)["rows"]
    assert row["rel_l2"] < 1e-5


def test_an_unbiased_sampler_is_at_its_noise_floor(tmp_path):
    """The mean error over n seeds is sqrt(n) below one seed's, as for independent errors."""
    seeds = 12
    (row,) = run(tmp_path, sampler(), inputs=one_input(sharp=1.0, tokens=512), seeds=seeds)["rows"]
    assert not row["deterministic"]
    # 2 heads x 512 tokens x 16 dims of noise: the ratio of the norms scatters by a few per cent,
    # and errors of neighbours go together.
    assert row["bias"] == pytest.approx(row["bias_expected"], rel=0.15)
    assert row["bias_expected"] == pytest.approx(row["rel_l2"] / math.sqrt(seeds), rel=0.05)
    assert row["bias_corrected"] < 0.4 * row["bias"]


def test_top_k_is_biased(tmp_path):
    (row,) = run(tmp_path, topk(), seeds=4)["rows"]
    assert row["deterministic"]
    assert row["bias"] == pytest.approx(row["rel_l2"])
    assert row["bias_expected"] < 0.6 * row["bias"]
    assert row["bias_corrected"] == pytest.approx(
        math.sqrt(sum(error**2 for error in row["rel_l2_heads"]) / 2), rel=1e-5
    )


def test_one_seed_says_nothing_of_bias(tmp_path):
    (row,) = run(tmp_path, sampler(), seeds=1)["rows"]
    assert row["bias"] is row["bias_expected"] is row["bias_corrected"] is None
    assert row["deterministic"] is None


def test_bias_is_the_norm_of_the_mean_error(tmp_path):
    (row,) = run(tmp_path, sampler(), seeds=3)["rows"]
    method = sampler().recipe.method
    q, k, v = (x[None] for x in tensors())
    outs = [gs.sparse_attention(q, k, v, method, gs.Call(seed=seed)) for seed in range(3)]
    dense = oracle.attention(q, k, v).out
    errors = torch.stack(outs).double() - dense
    size = dense.norm(dim=(2, 3))
    assert row["bias"] == pytest.approx((errors.mean(0).norm(dim=(2, 3)) / size).mean().item())
    relative = errors.norm(dim=(3, 4)) / size
    assert row["rel_l2"] == pytest.approx(relative.mean().item())
    expected = (relative.square().mean(0) / 3).sqrt().mean().item()
    assert row["bias_expected"] == pytest.approx(expected)


def test_the_same_measurement_gives_the_same_rows(tmp_path):
    inputs = {"low-entropy": structured_set("low-entropy", grid=GRID).capture()}
    rows = [
        run(tmp_path / name, sampler(), topk(), inputs=inputs, seeds=2)["rows"] for name in "ab"
    ]
    assert rows[0] == rows[1]


def test_the_global_random_state_stays(tmp_path):
    before = torch.get_rng_state()
    run(tmp_path, sampler(), seeds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_is_kept_over_the_steps_of_a_layer_alone(tmp_path, spied):
    calls = {(step, layer, "c"): tensors(seed=step) for step in (4, 5) for layer in (0, 1)}
    run(tmp_path, variant(Spy()), inputs={"x": capture_of(calls)}, seeds=3)
    once = [(0, layer, step, step - 3) for layer in (0, 1) for step in (4, 5)]
    again = [(1, *call[1:]) for call in once]
    # Two seeds gave the same, so the third was not run.
    assert sorted(spied) == sorted(once + again)


def test_means_are_over_heads_of_all_layers(tmp_path):
    calls = {(step, layer, "c"): tensors(seed=step) for step in (0, 1) for layer in (0, 3)}
    document = run(tmp_path, topk(), inputs={"x": capture_of(calls, heads=(5, 7))}, seeds=1)
    (row,), (source,) = document["rows"], document["inputs"]
    assert source["heads"] == ["l0.c.h5", "l0.c.h7", "l3.c.h5", "l3.c.h7"]
    assert source["steps"] == [0, 1]
    assert (row["heads"], row["calls"]) == (4, 4)
    assert row["rel_l2"] == pytest.approx(sum(row["rel_l2_heads"]) / 4, rel=1e-5)
    assert row["rel_l2_heads"][:2] == row["rel_l2_heads"][2:]  # both layers hold the same tensors


# Resuming, and what is refused.


def test_finished_cells_are_not_measured_again(tmp_path, spied):
    first = run(tmp_path, variant(Spy()), topk(), seeds=1)
    assert len(spied) == 1
    second = run(tmp_path, variant(Spy()), topk(0.5), seeds=1)
    assert len(spied) == 1
    assert second["rows"][0] == first["rows"][0]
    assert [row["density_asked"] for row in second["rows"]] == [0.5, 0.5]
    measure(
        Fidelity(inputs=one_input(), variants=[variant(Spy())], seeds=1), tmp_path, resume=False
    )
    assert len(spied) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": 2},
        {"rows": 8},
        {"inputs": one_input(seed=1)},
        {"variants": [variant(Spy(density=0.25))]},
    ],
)
def test_what_would_change_a_cell_makes_it_anew(tmp_path, spied, change):
    spec = {"inputs": one_input(), "variants": [variant(Spy())], "seeds": 1}
    measure(Fidelity(**spec), tmp_path)
    spied.clear()
    measure(Fidelity(**{**spec, **change}), tmp_path)
    assert spied


def test_an_interruption_loses_one_cell(tmp_path, spied):
    spec = Fidelity(
        inputs=one_input(), variants=[variant(Spy(density=d)) for d in (0.25, 0.5, 1.0)], seeds=1
    )

    def stop(progress):
        if progress.cells_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(spec, tmp_path, on_progress=stop)
    assert len(json.loads((tmp_path / RESULTS).read_text())["rows"]) == 2
    assert not list(tmp_path.rglob("*.tmp*"))
    spied.clear()
    assert len(measure(spec, tmp_path)["rows"]) == 3
    assert len(spied) == 1


def test_progress_counts_every_pass(tmp_path):
    seen = []
    spec = Fidelity(inputs=one_input(), variants=[topk(), sampler()], seeds=3)
    measure(spec, tmp_path, on_progress=seen.append)
    assert [(entry.done, entry.cells_done) for entry in seen] == [
        (0, 0), (1, 0), (3, 1), (4, 1), (5, 1),
    ]  # fmt: skip
    assert {(entry.total, entry.cells_total) for entry in seen} == {(6, 2)}
    assert seen[0].cell == "block-topk@0.25 on heads"


def test_a_refused_cell_is_named_and_the_others_go_on(tmp_path):
    inputs = one_input() | {"wide": capture_of({(0, 0, ""): tensors(dim=32)})}
    document = run(tmp_path, variant(Spy(refused_dim=32)), inputs=inputs, seeds=1)
    assert [row["input"] for row in document["rows"]] == ["heads"]
    assert document["skipped"] == [
        {
            "input": "wide",
            "method": "spy",
            "density_asked": 0.5,
            "reason": "not with this head dim",
        }
    ]


def test_nothing_but_refusals_is_an_error(tmp_path):
    with pytest.raises(FidelityError, match="not with this head dim"):
        run(tmp_path, variant(Spy(refused_dim=16)), seeds=1)


def test_an_output_that_is_not_finite_is_no_row(tmp_path):
    broken = tensors()
    broken.v[0, 3, 0] = torch.nan
    with pytest.raises(FidelityError, match="block-topk: the output is not finite"):
        run(tmp_path, topk(), inputs={"x": capture_of({(0, 0, ""): broken})})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"inputs": {}}, "needs inputs"),
        ({"variants": []}, "needs variants"),
        ({"variants": [topk(), topk()]}, "block-topk@0.25 is given 2 times"),
        ({"seeds": 0}, "seeds=0"),
        ({"rows": 0}, "rows=0"),
    ],
)
def test_an_ambiguous_measurement_is_refused(change, word):
    with pytest.raises(FidelityError, match=word):
        Fidelity(**{"inputs": one_input(), "variants": [topk()], **change})


def test_the_default_variants_are_all_methods():
    names = [entry.name for entry in choose_variants(densities=(0.1, 0.2))]
    expected = set(gs.list_methods()) - {"dense", "instagen"} | set(NAMED_VARIANTS)
    assert set(names) == expected
    assert len(names) == 2 * len(expected)


def test_variants_by_name_and_density():
    labels = [
        entry.label for entry in choose_variants(["svg2@.3", "instagen", "dense"], (0.1, 0.2))
    ]
    assert labels == ["svg2@0.3", "instagen@0.1", "instagen@0.2", "dense"]
    with pytest.raises(ValueError, match="did you mean 'block-topk'"):
        choose_variants(["block-topc"])
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        choose_variants(["svg2"], (1.5,))


def test_every_method_can_be_measured(tmp_path):
    inputs = {"high-entropy": structured_set("high-entropy", grid=(2, 4, 8)).capture()}
    variants = choose_variants(densities=(0.5,))
    document = run(tmp_path, *variants, inputs=inputs, seeds=1, rows=16)
    assert document["skipped"] == []
    assert len(document["rows"]) == len(variants)


def test_a_finished_cell_does_not_hide_behind_another_library_version(tmp_path, monkeypatch, spied):
    run(tmp_path, variant(Spy()), seeds=1)
    facts = module.environment("cpu")
    monkeypatch.setattr(module, "environment", lambda _: {**facts, "gossamer": "9"})
    run(tmp_path, variant(Spy()), seeds=1)
    assert len(spied) == 2
