"""What `gossamer bench` measures, its clock and its dense attention replaced: without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import gossamer as gs
from gossamer.evaluation.bench import check, dense, kernels, model, plans
from gossamer.evaluation.bench.case import Stage, normal
from gossamer.evaluation.bench.cases import CASES
from gossamer.evaluation.bench.dense import DenseTimes, fastest_dense
from gossamer.evaluation.bench.document import Run
from gossamer.evaluation.bench.plan_case import PlanStage
from gossamer.evaluation.bench.plan_cases import PLAN_CASES
from gossamer.evaluation.bench.random_rows import RandomRows
from gossamer.evaluation.bench.timing import Timing
from gossamer.evaluation.bench.wan import WanModel

CPU = torch.device("cpu")
TIMING = Timing(median_ms=10.0, spread_ms=0.5, peak_extra_bytes=64)
DENSE = Timing(median_ms=40.0, spread_ms=0.1, peak_extra_bytes=0)


def attend_densely(name, q, k, v, *, causal=False):
    assert name == "cudnn"
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


@pytest.fixture
def asked(monkeypatch):
    """Replace what needs a GPU; collect what dense attention was timed on."""
    asked = []

    def fastest(q, k, v, *, causal=False):
        asked.append((tuple(q.shape), causal))
        slow = replace(DENSE, median_ms=70.0)
        return DenseTimes(name="cudnn", timing=DENSE, each=(("cudnn", DENSE), ("flash-2", slow)))

    def time_call(call, **_settings):
        call()
        return TIMING

    for module in (kernels, plans, model):
        monkeypatch.setattr(module, "fastest_dense", fastest)
        monkeypatch.setattr(module, "time_call", time_call)
    monkeypatch.setattr(model, "attend_densely", attend_densely)
    monkeypatch.setattr(plans, "count_synchronisations", lambda call: 2)
    return asked


def case_of(name, cases=CASES, factor=0.01):
    return next(case for case in cases if case.name == name).scaled(factor)


def test_kernels_are_measured_against_dense_attention(asked, tmp_path):
    out = tmp_path / "kernels.json"
    case = case_of("blocks-75600")
    document = kernels.bench_kernels(
        cases=[case], densities=(0.5,), kernels=["cpu"], run=Run(device=CPU, out=out)
    )
    assert asked == [((1, 12, case.num_tokens, 128), False)]
    cudnn, flash, row = document["rows"]
    assert [(r["kernel"], r["dense_kernel"]) for r in (cudnn, flash)] == [
        ("cudnn", None),
        ("flash-2", None),
    ]
    density = row["density"]
    assert row == {
        "case": "blocks-75600",
        "stage": "",
        "kernel": "cpu",
        "num_tokens": case.num_tokens,
        "density": density,
        "median_ms": 10.0,
        "spread_ms": 0.5,
        "peak_extra_bytes": 64,
        "prepare_ms": 0.0,
        "layers": 0,
        "dense_ms": 40.0,
        "dense_kernel": "cudnn",
        "efficiency": 4 * density,
        "speedup": 4.0,
        "rel_error": row["rel_error"],
    }
    assert row["rel_error"] < 0.02
    assert set(cudnn) == set(row)
    assert json.loads(out.read_text()) == document


def test_causal_plans_are_measured_against_causal_dense_attention(asked):
    case = case_of("intra8-16384-causal", factor=0.02)
    document = kernels.bench_kernels(cases=[case], kernels=["cpu"], run=Run(device=CPU))
    assert asked == [((1, 32, case.num_tokens, 128), True)]
    assert [row["stage"] for row in document["rows"]] == ["", "", "scatter", "gather"]


def test_layers_are_added_up(asked):
    case = case_of("intra-g2s4-65536-causal", factor=0.006)
    document = kernels.bench_kernels(cases=[case], kernels=["cpu"], run=Run(device=CPU))
    everywhere, window, total = document["rows"][-3:]
    assert (everywhere["layers"], window["layers"]) == (4, 28)
    assert (total["stage"], total["layers"], total["kernel"]) == ("32 layers", 32, "cpu")
    assert (total["median_ms"], total["dense_ms"]) == (320.0, 32 * 40.0)
    density = (4 * everywhere["density"] + 28 * window["density"]) / 32
    assert total["density"] == pytest.approx(density)
    assert total["efficiency"] == pytest.approx(4 * density)
    assert set(total) == set(window)


def test_layers_are_not_added_up_where_a_kind_was_refused(asked, monkeypatch):
    def refuse_windows(kernel, q, k, v, plan, bound):
        if plan.window is not None:
            raise ArithmeticError("wrong")
        return 0.0

    monkeypatch.setattr(kernels, "check_kernel", refuse_windows)
    case = case_of("intra-g2s4-65536-causal", factor=0.006)
    document = kernels.bench_kernels(cases=[case], kernels=["cpu"], run=Run(device=CPU))
    assert [row["stage"] for row in document["rows"]] == ["", "", "global"]
    assert document["failures"] == [{"case": "intra-g2s4-65536-causal window", "failure": "wrong"}]


def test_ordering_counts_with_the_kernel(asked):
    case = case_of("clustered-148k")
    document = kernels.bench_kernels(cases=[case], kernels=["cpu"], run=Run(device=CPU))
    rows = {row["stage"]: row for row in document["rows"][2:]}
    assert (rows["arrival"]["median_ms"], rows["arrival"]["prepare_ms"]) == (10.0, 0.0)
    assert (rows["wavealign"]["median_ms"], rows["wavealign"]["prepare_ms"]) == (20.0, 10.0)
    assert rows["wavealign"]["speedup"] == 2.0


def test_a_wrong_kernel_has_no_time(asked, monkeypatch):
    real = gs.attend

    def attend(q, k, v, plan, **options):
        got = real(q, k, v, plan, **options)
        return got._replace(out=got.out * 1.1) if options["kernel"] == "cpu" else got

    monkeypatch.setattr(check.gs, "attend", attend)
    case = RandomRows(name="x", kind="tokens", num_tokens=400, heads=2, dim=64)
    document = kernels.bench_kernels(
        cases=[case], densities=(0.5,), kernels=["cpu"], run=Run(device=CPU)
    )
    assert [row["kernel"] for row in document["rows"]] == ["cudnn", "flash-2"]
    (failure,) = document["failures"]
    assert failure["case"] == "x"
    assert failure["failure"].startswith("cpu: relative error 0.1")


def test_kernels_are_checked_on_the_queries_of_each_head():
    """Clustered plans put other queries into the tiles of every head."""
    q, k, v = normal(CPU, heads=3, num_tokens=700, dim=64)
    plan = gs.InstaGen(exact=0.2, sampled=0.2).plan(q, k, v)
    assert plan.query_index is not None
    assert check.check_kernel("cpu", q, k, v, plan, check.error_bound(q, k, v)) < 0.02


def test_plans_are_measured_against_dense_attention(asked, tmp_path):
    out = tmp_path / "plans.json"
    factor = 0.02
    cases = [case_of(f"{name}-75600", PLAN_CASES, factor) for name in ("instagen", "intra")]
    document = plans.bench_plans(cases=cases, run=Run(device=CPU, out=out))
    assert len(asked) == 1  # one shape
    dense_rows, rows = document["rows"][:2], document["rows"][2:]
    assert [(row["case"], row["stage"]) for row in rows] == [
        ("instagen-75600", "cold"),
        ("instagen-75600", "warm"),
        ("intra-75600", "cold"),
        ("intra-75600", "cached"),
    ]
    assert {"median_ms", "spread_ms", "peak_extra_bytes", "dense_ms", "dense_kernel"} < set(rows[0])
    assert (rows[0]["dense_share"], rows[0]["synchronisations"]) == (0.25, 2)
    assert rows[1]["density"] == pytest.approx(0.16, abs=0.02)
    assert [row["stage"] for row in dense_rows] == ["cudnn", "flash-2"]
    assert all(set(row) == set(rows[0]) for row in dense_rows)
    assert json.loads(out.read_text()) == document


def test_a_wrong_plan_has_no_time(asked):
    case = case_of("block-topk-75600", PLAN_CASES, 0.02)
    document = plans.bench_plans(cases=[replace(case, density=0.5)], run=Run(device=CPU))
    assert len(document["rows"]) == 2  # of dense attention
    (failure,) = document["failures"]
    assert failure["case"] == "block-topk-75600 cold"
    assert "0.5 was asked for" in failure["failure"]


@pytest.fixture
def wan():
    pytest.importorskip("diffusers")
    grid = (2, 16, 16)
    return WanModel(name="wan-tiny", num_layers=2, heads=2, ffn_dim=64, grid=grid, text_dim=32)


def test_models_are_measured_by_recipe(asked, wan, tmp_path):
    out = tmp_path / "model.json"
    cut = wan.with_layers(1)
    document = model.bench_model(models=[wan, cut], run=Run(device=CPU, out=out))
    assert (document["failures"], document["missing"]) == ([], [])
    rows = document["rows"]
    names = ["dense", "instagen-8-8", "blocks-50-fixed", "mc-sparse-15-reuse"]
    assert [row["recipe"] for row in rows] == names * 2
    assert [row["case"] for row in rows] == ["wan-tiny"] * 4 + ["wan-tiny-1-of-2-layers"] * 4
    assert [(row["layers"], row["model_layers"]) for row in rows[3:5]] == [(2, 2), (1, 2)]
    assert [row["kernel"] for row in rows[:4]] == ["cudnn", "cpu", "cpu", "cpu"]
    assert [round(row["density"], 2) for row in rows[:4]] == [1.0, 0.16, 0.5, 0.15]
    shares = rows[1]
    assert shares["attention_share"] == shares["attention_ms"] / 10.0
    assert 0 < shares["plan_ms"] < shares["attention_ms"]
    assert rows[0]["plan_ms"] == 0.0
    assert [row["shared_anchor_bytes"] is None for row in rows[:4]] == [True, True, True, False]
    assert json.loads(out.read_text()) == document


def test_a_model_whose_kernel_is_wrong_has_no_time(asked, wan, monkeypatch):
    def refuse(kernel, *_rest):
        raise ArithmeticError(f"{kernel} is wrong")

    monkeypatch.setattr(model, "check_kernel", refuse)
    document = model.bench_model(models=[wan], run=Run(device=CPU))
    assert [row["recipe"] for row in document["rows"]] == ["dense"]
    assert document["failures"][0] == {"case": "wan-tiny instagen-8-8", "failure": "cpu is wrong"}
    assert len(document["failures"]) == 3


def test_forwards_that_replan_are_no_reuse_steps(asked, wan, monkeypatch):
    recipe = gs.Recipe(method=gs.BlockTopK(density=0.5), min_tokens=0)
    variants = (replace(model._sparse()[1], recipe=recipe),)
    monkeypatch.setattr(model, "_sparse", lambda: variants)
    document = model.bench_model(models=[wan], run=Run(device=CPU))
    assert "calls went sparse, not reuse" in document["failures"][0]["failure"]


def test_a_model_needs_diffusers(monkeypatch):
    monkeypatch.setattr(model, "check_diffusers", _missing)
    with pytest.raises(gs.MissingExtraError):
        model.bench_model()


def _missing():
    raise gs.MissingExtraError("diffusers", "the Wan transformer")


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_fastest_dense_attention_is_the_yardstick(monkeypatch, installed, causal):
    """flash-attn-4 counts where it runs, and takes its tensors with heads behind tokens."""
    asked = []

    def flash(*tensors, causal):
        asked.append(([tuple(x.shape) for x in tensors], causal))
        return tensors[0], None

    def sdpa(q, k, v, *, is_causal, enable_gqa):
        asked.append((enable_gqa, is_causal))
        return q

    monkeypatch.setattr(dense, "check_dense", lambda *x, **options: 0.0)
    monkeypatch.setattr(dense, "unavailable", lambda device: [] if installed else ["no"])
    monkeypatch.setattr(dense, "_flash_attention", lambda: flash)
    monkeypatch.setattr(dense.functional, "scaled_dot_product_attention", sdpa)
    times = iter([50.0, 80.0, 40.0])
    monkeypatch.setattr(dense, "time_call", lambda call: replace(DENSE, median_ms=next(times)))
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    found = fastest_dense(q, k, k, causal=causal)
    names = ["cudnn", "flash-2"] + ["flash-attn-4"] * installed
    assert [name for name, _ in found.each] == names
    want = (40.0, "flash-attn-4") if installed else (50.0, "cudnn")
    assert (found.timing.median_ms, found.name) == want
    shapes = [(1, 8, 4, 16), (1, 8, 2, 16), (1, 8, 2, 16)]
    assert asked == [(True, causal)] * 2 + [(shapes, causal)] * installed


def test_dense_attention_without_groups_gets_its_heads_repeated(monkeypatch):
    shapes = []

    def sdpa(q, k, v, *, is_causal, enable_gqa):
        if enable_gqa:
            raise RuntimeError("No available kernel")
        shapes.append(tuple(k.shape))
        return q

    monkeypatch.setattr(dense, "check_dense", lambda *x, **options: 0.0)
    monkeypatch.setattr(dense, "unavailable", lambda device: ["no"])
    monkeypatch.setattr(dense.functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(dense, "time_call", lambda call: DENSE)
    fastest_dense(torch.randn(1, 4, 8, 16), *torch.randn(2, 1, 2, 8, 16))
    assert shapes == [(1, 4, 8, 16)] * 2


def test_dense_attention_that_does_not_run_is_left_out(monkeypatch):
    monkeypatch.setattr(dense, "unavailable", lambda device: ["no"])
    monkeypatch.setattr(dense, "time_call", lambda call: DENSE)

    def sdpa(*_tensors, **_options):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(dense.functional, "scaled_dot_product_attention", sdpa)
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(RuntimeError, match="no dense attention runs here: cudnn: No available"):
        fastest_dense(q, q, q)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention_is_checked_on_every_head(causal):
    q, k, v = normal(CPU, heads=4, num_tokens=300, dim=64, kv_heads=2)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert check.check_dense("x", out, q, k, v, causal=causal) < 0.01
    with pytest.raises(ArithmeticError, match="x: relative error"):
        check.check_dense("x", out, q, k, v, causal=not causal)
    out[:, 3] *= 1.2
    with pytest.raises(ArithmeticError, match="x: relative error"):
        check.check_dense("x", out, q, k, v, causal=causal)


def test_wrong_dense_attention_is_no_yardstick(monkeypatch):
    def attend(name, q, k, v, *, causal):
        return functional.scaled_dot_product_attention(q, k, v) * 1.2

    monkeypatch.setattr(dense, "unavailable", lambda device: ["no"])
    monkeypatch.setattr(dense, "attend_densely", attend)
    with pytest.raises(ArithmeticError, match="cudnn: relative error 0.2"):
        fastest_dense(*normal(CPU, heads=2, num_tokens=300, dim=64))


def test_stages_are_plain_values():
    plan = gs.BlockTopK(density=0.5).plan(*normal(CPU, heads=1, num_tokens=300, dim=16))
    assert (Stage(plan=plan).name, Stage(plan=plan).layers) == ("", 0)
    stage = PlanStage(name="cold", call=lambda: plan, check=lambda found: found.density)
    assert stage.check(stage.call()) == plan.density
