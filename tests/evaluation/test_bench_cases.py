"""The cases of `gossamer bench`: valid plans, of the methods that they are named after."""

from __future__ import annotations

import sys

import pytest
import torch

import gossamer as gs
from gossamer.evaluation.bench.cases import CASES
from gossamer.evaluation.bench.clustered_masks import ClusteredMasks, sorted_in_waves
from gossamer.evaluation.bench.grouping import check_clusters, check_order
from gossamer.evaluation.bench.intra_layers import IntraLayers
from gossamer.evaluation.bench.plan_cases import DEFAULT_CASES, PLAN_CASES
from gossamer.evaluation.bench.random_rows import RandomRows
from gossamer.evaluation.bench.wan import MODELS

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("cases", [CASES, PLAN_CASES, MODELS])
def test_names_are_unique(cases):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", BY_NAME)
def test_plans_of_kernel_cases_are_valid(name):
    case = BY_NAME[name].scaled(0.012)
    tensors = case.tensors(CPU)
    stages = list(case.stages((0.2,), tensors, CPU))
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        stage.plan.validate()
        assert stage.plan.causal is case.causal
        assert stage.plan.num_queries == tensors[0].shape[2]


def test_random_rows_have_the_density_asked_unless_they_have_their_own():
    case = RandomRows(name="x", kind="tokens", num_tokens=1000, heads=2, dim=64)
    stages = list(case.stages((0.1, 0.5), case.tensors(CPU), CPU))
    assert [round(stage.plan.density, 3) for stage in stages] == [0.1, 0.5]
    full = BY_NAME["blocks-32760-full"].scaled(0.05)
    (stage,) = full.stages((0.1, 0.5), full.tensors(CPU), CPU)
    assert stage.plan.density == 1.0


def test_weighted_rows_read_virtual_keys():
    case = BY_NAME["tokens-75600-weighted"].scaled(0.01)
    (stage,) = case.stages((0.5,), case.tensors(CPU), CPU)
    assert stage.plan.keys.num_extra > 0
    assert stage.plan.keys.log_weight is not None


def test_intra_on_images_is_the_size_of_flux_at_2k():
    case = BY_NAME["intra8-flux2k"]
    assert (case.num_tokens, case.heads) == (16_896, 24)
    call = gs.Call(grid=case.grid, text=(0, case.text))
    call.check(1, case.num_tokens, case.num_tokens)


def test_kinds_of_layers_are_counted_over_the_model():
    def layers(name, factor):
        case = BY_NAME[name].scaled(factor)
        stages = case.stages((), case.tensors(CPU), CPU)
        return {stage.name: stage.layers for stage in stages}

    assert layers("intra-g2s4-65536-causal", 0.01) == {"global": 4, "window": 28}
    assert layers("intra8-flux2k", 0.05) == {"scatter": 29, "gather": 28}
    assert layers("intra8-16384", 0.02) == {"scatter": 0, "gather": 0}


def test_intra_sequences_share_kv_heads_as_llama_does():
    case = BY_NAME["intra8-65536-causal"]
    assert isinstance(case, IntraLayers)
    q, k, v = case.scaled(0.01).tensors(CPU)
    assert (q.shape[1], k.shape[1], v.shape[1]) == (32, 8, 8)


def test_orders_of_clustered_masks_are_orders_of_one_plan():
    case = ClusteredMasks(name="x", num_tokens=6_400, heads=2)
    stages = list(case.stages((), (), CPU))  # tensors are not looked at
    names = ["arrival", "by angle", "by length in waves", "wavealign"]
    assert [stage.name for stage in stages] == names
    first = stages[0].plan
    assert first.launch_order is None
    assert stages[0].prepare is None
    for stage in stages[1:]:
        assert stage.prepare is not None
        assert stage.plan.keys is first.keys
        assert stage.plan.launch_order is not None
        stage.plan.validate()


def test_clustered_rows_are_uneven_and_alike_in_a_cluster():
    case = ClusteredMasks(name="x", num_tokens=25_600, heads=1)
    plan = case.plan(CPU)
    count = plan.keys.count.double()
    assert 0.2 < float(count.std() / count.mean()) < 0.6
    assert plan.density == pytest.approx(case.density, abs=0.03)
    mask = plan.keys.to_mask(plan.num_keys)[0, 0].double()
    shared = (mask @ mask.T) / count[0, 0]  # of each row's blocks, in another row
    shared.fill_diagonal_(0.0)
    alike = shared.max(-1).values.mean()
    assert alike > 2 * shared.sum(-1).mean() / (len(mask) - 1)


def test_sorting_in_waves_keeps_waves_apart():
    plan = ClusteredMasks(name="x", num_tokens=6_400, heads=2).plan(CPU)
    ordered = sorted_in_waves(plan, 10)
    for head in range(2):
        for wave in ordered.launch_order[0, head].long().split(10):
            count = plan.keys.count[0, head, wave]
            assert torch.equal(count, count.sort(descending=True).values)
        waves = torch.arange(plan.num_tiles) // 10
        assert torch.equal(waves[ordered.launch_order[0, head].long()], waves)


@pytest.mark.parametrize("case", PLAN_CASES, ids=lambda case: case.name)
def test_plan_cases_pass_their_own_check(case):
    num_tokens = case.masks.num_tokens if hasattr(case, "masks") else case.shape.num_tokens
    case = case.scaled(1_600 / num_tokens)
    tensors = case.tensors(CPU)
    names = []
    for stage in case.stages(tensors, CPU):
        density = stage.check(stage.call())
        assert density is None or 0 < density <= 1
        names.append(stage.name)
    kind = case.name.rsplit("-", 1)[0]
    assert names == STAGES.get(kind, ["cold"])


STAGES = {
    "instagen": ["cold", "warm"],
    "svg2": ["cold", "warm"],
    "mc-sparse-anchor": ["plan", "anchor"],
    "intra": ["cold", "cached"],
    "radial": ["cold", "cached"],
    "kmeans300": ["cold", "warm"],
    "kmeans1000": ["cold", "warm"],
    "wavealign": ["decide", "order"],
}


def test_default_plan_cases_are_those_of_the_large_size():
    assert all("32760" not in case.name for case in DEFAULT_CASES)
    assert {case.shape.num_tokens for case in DEFAULT_CASES if hasattr(case, "shape")} == {75_600}


def test_flash_kmeans_runs_beside_where_it_is_installed(monkeypatch):
    """Its call as its README and signature have it: [B, N, D], and it writes to its start."""
    from gossamer.evaluation.bench import grouping

    calls = []

    def cluster(x, n_clusters, max_iters=100, tol=0.0, init_centroids=None, verbose=False):
        calls.append((tuple(x.shape), n_clusters, max_iters, tol))
        found = init_centroids
        for _ in range(max_iters):
            labels = torch.cdist(x.float(), found.float()).argmin(-1)
            one_hot = torch.nn.functional.one_hot(labels, n_clusters).float()
            size = one_hot.sum(1)[..., None]
            means = (one_hot.mT @ x.float()) / size.clamp(min=1)
            found = torch.where(size > 0, means, found.float()).to(x.dtype)
        init_centroids.fill_(torch.nan)
        return labels, found, max_iters

    monkeypatch.setattr(grouping, "flash_kmeans", lambda: cluster)
    (case,) = (case for case in PLAN_CASES if case.name == "kmeans300-75600")
    case = case.scaled(0.02)
    stages = {stage.name: stage for stage in case.stages(case.tensors(CPU), CPU)}
    assert list(stages)[2:] == ["cold, flash-kmeans", "warm, flash-kmeans"]
    for _ in range(2):  # from the same start
        stages["warm, flash-kmeans"].check(stages["warm, flash-kmeans"].call())
    shape = (case.shape.heads, case.shape.num_tokens, 128)
    assert calls == [(shape, case.clusters, 2, 0.0)] * 2


def test_flash_kmeans_is_left_out_where_it_is_absent(monkeypatch):
    from gossamer.evaluation.bench import grouping

    monkeypatch.setitem(sys.modules, "flash_kmeans", None)
    assert grouping.flash_kmeans() is None


def test_wrong_clusters_are_refused():
    x = torch.randn(1, 1, 400, 8)
    labels = torch.arange(400).view(1, 1, 400) % 4
    means = torch.stack([x[0, 0, labels[0, 0] == c].mean(0) for c in range(4)])[None, None]
    check_clusters(x, labels, means)
    with pytest.raises(ArithmeticError, match="centroids are off by"):
        check_clusters(x, labels.roll(1, dims=2), means)
    with pytest.raises(ArithmeticError, match="labels outside"):
        check_clusters(x, labels + 1, means)


def test_wrong_orders_are_refused():
    x = torch.randn(1, 1, 512, 8)
    with pytest.raises(ArithmeticError, match="names some token twice"):
        check_order(x, torch.zeros(1, 1, 512, dtype=torch.int64))
    with pytest.raises(ArithmeticError, match="no tighter"):
        check_order(x, torch.arange(512).view(1, 1, 512))


def test_wan_models_have_wans_geometry():
    found = {m.name: (m.num_layers, m.heads, m.ffn_dim, m.num_tokens) for m in MODELS}
    assert found == {
        "wan2.1-14b-720p": (40, 40, 13_824, 75_600),
        "wan2.1-14b-480p": (40, 40, 13_824, 32_760),
        "wan2.1-1.3b-720p": (30, 12, 8_960, 75_600),
        "wan2.1-1.3b-480p": (30, 12, 8_960, 32_760),
    }
