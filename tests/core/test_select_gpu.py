"""Selection by GPU kernels equals selection by torch: on the CPU, through Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from gossamer.counter import uniform
from gossamer.group import Clusters, Pairs, Sorted, sort_by_group
from gossamer.group.pairs import pair
from gossamer.methods.clustered import ClusteredMethod
from gossamer.plan import KeyTokens
from gossamer.select import (
    inclusion_by_importance,
    list_draws,
    list_keys,
    list_sampled,
    row_phases,
    systematic,
    take_clusters,
)
from gossamer.select.compensate import group_means
from gossamer.select.gpu import clustered as gpu
from gossamer.testing import Shape

COMPILE = Path(__file__).parent / "compile_select.py"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by the test of each part")
# Triton's interpreter is numpy, which warns of what the kernels mask: log(0), inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.skipif(INTERPRETED, reason="starts what runs interpreted")
@pytest.mark.parametrize("part", ["sampled", "taken or draws or phases", "methods"])
def test_it_selects_as_torch_does(part: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_XDIST_WORKER_COUNT": "1"}
    pick = f"interpreted and ({part})"
    command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")]
    command += [__file__, "-k", pick]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("kernel", ["decide", "take", "list"])
def test_it_compiles_for_hopper_without_spills(kernel: str) -> None:
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    command = [sys.executable, str(COMPILE), kernel]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    spills = {name: code["spills"] for name, code in json.loads(result.stdout).items()}
    assert spills
    assert not any(spills.values()), spills


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what torch makes and what the kernels do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "can_run", lambda _: False)
        by_torch = make()
    assert gpu.can_run(torch.zeros(1))
    return by_torch, make()


def assert_same(by_torch: KeyTokens, by_kernels: KeyTokens) -> None:
    for name in ("start", "count", "index"):
        want, got = getattr(by_torch, name), getattr(by_kernels, name)
        assert want.dtype == got.dtype, name
        assert torch.equal(want, got), name
    if by_torch.log_weight is None:
        assert by_kernels.log_weight is None
    else:
        torch.testing.assert_close(by_kernels.log_weight, by_torch.log_weight, rtol=1e-6, atol=1e-6)


class Case:
    """Random clusters and scores: some clusters empty, some keys left out."""

    def __init__(self, seed: int, *, spread: float, ties: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        number = lambda low, high: int(torch.randint(low, high + 1, (), generator=g))  # noqa: E731
        self.batch, kv_heads, group = number(1, 2), number(1, 2), number(1, 2)
        self.heads = kv_heads * group
        # Rows are what interpretation costs: more than one word of them in one head alone.
        self.num_rows = number(33, 36) if self.batch * self.heads == 1 else number(1, 4)
        self.num_keys = number(1, 400)
        self.num_clusters = number(1, 60)
        drawn_from = number(1, self.num_clusters)
        of = torch.randint(drawn_from, (self.batch, kv_heads, self.num_keys), generator=g)
        valid = torch.rand(self.batch, self.num_keys, generator=g) < (0.8 if number(0, 1) else 2.0)
        ordered = sort_by_group(of, self.num_clusters, valid=valid)
        head = torch.arange(self.heads) // group
        self.keys = Sorted(*(x[:, head] for x in ordered))
        shape = (self.batch, self.heads, self.num_rows, self.num_clusters)
        self.scores = spread * torch.randn(shape, generator=g)
        if ties:
            self.scores = self.scores.round()
        self.valid = self.keys.size.sum(-1, keepdim=True)  # [B, H, 1]
        phase = torch.randint(2**31, shape[:3], generator=g).double() * 2 + 1
        self.phase = phase * 2.0**-32


cases = st.builds(
    Case,
    st.integers(0, 10**6),
    spread=st.sampled_from([0.3, 3.0, 40.0, 600.0]),
    ties=st.booleans(),
)


@interpreted
@settings(max_examples=14)
@given(
    cases,
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    st.booleans(),
)
def test_interpreted_sampled(case: Case, exact: float, sampled: float, uniform: bool) -> None:
    budget = (case.valid * exact).round().long()
    total = (case.valid * min(exact + sampled, 1.0)).round().long().clamp(min=1)
    width = max(1, round(case.num_keys * min(exact + sampled, 1.0)))
    by_torch, by_kernels = both(
        lambda: list_sampled(
            *(case.scores, case.keys, budget, total, case.phase), uniform=uniform, width=width
        )
    )
    assert_same(by_torch, by_kernels)


@interpreted
@settings(max_examples=12)
@given(cases, st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.sampled_from(["exclude", "include", "cut"]))
def test_interpreted_taken(case: Case, share: float, crossing: str) -> None:
    sizes = case.keys.size[:, :, None]
    budget = (case.valid * share).round().long()
    scores = case.scores + sizes.double().log() if crossing == "cut" else case.scores
    taken, by_kernels = both(lambda: take_clusters(scores, sizes, budget, crossing=crossing))
    assert torch.equal(taken, by_kernels)
    assert_same(*both(lambda: list_keys(taken, case.keys)))
    assert_same(*both(lambda: list_keys(taken, case.keys, width=case.num_keys)))


@interpreted
def test_interpreted_taken_of_sizes_and_budgets_of_every_row() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 9, generator=g)
    scores[0, :, 2:4] = -torch.inf  # may be chosen last
    sizes = torch.randint(0, 7, (2, 5, 9), generator=g)
    budget = torch.randint(0, 30, (2, 5), generator=g)
    for crossing in ("exclude", "include", "cut"):
        take = partial(take_clusters, scores, sizes, budget, crossing=crossing)
        assert torch.equal(*both(take))


@interpreted
@settings(max_examples=8)
@given(cases, st.sampled_from([0.0, 0.15, 0.5, 1.0]))
def test_interpreted_draws(case: Case, share: float) -> None:
    sizes = case.keys.size[:, :, None]
    none = (case.scores < -1e9) | (sizes == 0)
    budget = (case.valid * share).round().long().expand(none.shape[:3])
    log_pi = inclusion_by_importance(case.scores, sizes, none, budget)
    draws = systematic(log_pi, sizes, case.phase)
    assert_same(*both(lambda: list_draws(draws, case.keys, width=case.num_keys)))


@interpreted
def test_interpreted_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, spread=3.0, ties=False)
    total = (case.valid * 0.5).round().long()
    make = lambda: list_sampled(  # noqa: E731
        *(case.scores, case.keys, total // 2, total, case.phase), uniform=False, width=200
    )
    whole = make()
    monkeypatch.setattr(gpu, "_TABLE_BYTES", 1)
    assert_same(whole, make())


@interpreted
def test_interpreted_phases() -> None:
    call = gs.Call(seed=7, layer=3, step=40, head_offset=2)
    got = row_phases(2, call, 3, 130, torch.device("cpu"))
    heads, rows = torch.arange(3)[:, None] + 2, torch.arange(130)
    want = uniform(2, 7, 3, 40, heads, rows, device=torch.device("cpu"))
    assert torch.equal(got, (want * 2.0**32).floor() / 2.0**32)


def random_pairs(q: torch.Tensor, k: torch.Tensor, call: gs.Call) -> Pairs:
    """Return random clusters and their means, in place of k-means, which has tests of its own."""

    def clusters(x: torch.Tensor, number: int) -> Clusters:
        of = torch.randint(number, x.shape[:3], generator=torch.Generator().manual_seed(1))
        size = sort_by_group(of, number, valid=valid).size
        return Clusters(centroids=group_means(x, of, number), labels=of, sizes=size)

    valid = None if call.key_valid is None else call.key_valid.expand(q.shape[0], -1)
    active = None if valid is None else valid.sum(-1).clamp(max=17)
    return pair(clusters(q, 2), clusters(k, 17), active, valid, 1.0)


METHODS = [
    gs.InstaGen(density=0.24),
    gs.InstaGen(density=1.0),
    gs.InstaGen(exact=0.0, sampled=0.2),
    gs.InstaGen(exact=0.2, sampled=0.0),
    gs.InstaGen(density=0.3, exact=0.3),
    gs.InstaGen(density=0.2, sampler="uniform", scorer="variance"),
    gs.InstaGen(density=0.3, sampler="poisson"),
    gs.SVG2(density=0.2),
    gs.SVG2(),
    gs.SVGEAR(density=0.2),
    gs.SVGEAR(),
]


@interpreted
@pytest.mark.parametrize(
    ("method", "text"),
    [(method, None if place % 3 else (0, 17)) for place, method in enumerate(METHODS)],
    ids=range(len(METHODS)),
)
def test_interpreted_methods(
    method: gs.Method, text: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding, text, batch rows and shared KV heads, through finished plans."""
    monkeypatch.setattr(
        ClusteredMethod, "_pairs", lambda _, q, k, call, __: random_pairs(q, k, call)
    )
    shape = Shape(2, 4, 2, 200, 200, 16, 3)
    valid = torch.arange(200) < torch.tensor([[200], [121]])
    call = gs.Call(text=text, key_valid=valid)
    by_torch, by_kernels = both(lambda: method.plan(*shape.tensors(), call))
    by_kernels.validate()
    assert isinstance(by_kernels.keys, KeyTokens)
    assert_same(by_torch.keys, by_kernels.keys)
