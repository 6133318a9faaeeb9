"""SVG-EAR against its definition in plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer as gs
from cases import shapes
from gossamer.group import ClusterSettings, Pairs, cluster_pairs
from gossamer.methods.svg_ear import SVGEAR
from gossamer.select.replacement_error import log_replacement_error
from gossamer.testing import Shape, assert_matches, attention, tolerance

SHAPES = [
    Shape(1, 2, 1, 200, 200, 16, 1),
    Shape(2, 1, 3, 70, 211, 20, 2),
    Shape(2, 2, 2, 150, 150, 8, 3),
]


def pairs_of(method: SVGEAR, q: Tensor, k: Tensor, call: gs.Call) -> Pairs:
    settings = ClusterSettings(
        query_clusters=method.query_clusters,
        key_clusters=method.key_clusters,
        iterations=method.iterations,
        warm_iterations=method.warm_iterations,
    )
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    return cluster_pairs(q, k, call, scale, settings, None)


def members(pairs: Pairs, b: int, kv: int, c: int, valid: Tensor | None) -> Tensor:
    """The keys of a cluster, ascending."""
    of = pairs.key_clusters.labels[b, kv] == c
    return (of if valid is None else of & valid[b]).nonzero().flatten()


def log_error(query: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """The error of one pair by its definition, relative to the greatest logit, float64."""
    query, k, v = query.double(), k.double(), v.double()
    logits, centre = k @ query * scale, float(k.mean(0) @ query * scale)
    top = max(float(logits.max()), centre)
    off = (logits - top).exp()[:, None] * v - math.exp(centre - top) * v.mean(0)
    total = float(off.square().sum())
    return 2 * top + math.log(total) if total > 0 else -math.inf


def row_by_loops(method: SVGEAR, pairs: Pairs, at: tuple[int, int, int], error: Tensor) -> set[int]:
    """The clusters that query cluster (b, h, g) reads exactly."""
    b, h, g = at
    size = pairs.keys.size[b, h].tolist()
    used = [c for c, n in enumerate(size) if n > 0]
    active = len(size) if pairs.active_keys is None else int(pairs.active_keys[b])
    mass = {c: math.log(size[c]) + float(pairs.log_scores[b, h, g, c]) for c in used}
    best = sorted(used, key=lambda c: -mass[c])
    floor = int(active * method.min_ratio)
    if method.density is None:
        total, covered, budget = sum(math.exp(m) for m in mass.values()), 0.0, 0
        for i, c in enumerate(best):
            if covered < method.mass or i < max(floor, 1):
                budget += size[c]
            covered += math.exp(mass[c]) / total
        cost = dict(zip(used, (size[c] for c in used), strict=True))
    else:
        budget = max(round(sum(size) * method.density) - len(used), 0)
        cost = dict(zip(used, (size[c] - 1 for c in used), strict=True))
    first = best[:floor]
    rest = [c for c in used if c not in first]
    rest.sort(key=lambda c: -(float(error[c]) - method.gamma * math.log(size[c])))
    taken: set[int] = set()
    for c in first + rest:
        if cost[c] <= budget:
            taken.add(c)
            budget -= cost[c]
    return taken


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "params",
    [{"density": 0.3}, {"density": 0.6, "gamma": 0.0, "min_ratio": 0.3}, {"mass": 0.5}],
    ids=str,
)
def test_the_plan_is_the_definition(shape: Shape, padded: bool, params: dict[str, float]) -> None:
    q, k, v = shape.tensors()
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.8
        k = k.masked_fill(~valid[:, None, :, None], torch.nan)
        v = v.masked_fill(~valid[:, None, :, None], torch.nan)
    call = gs.Call(key_valid=valid, scale=0.4)
    method = SVGEAR(key_clusters=12, query_clusters=5, iterations=4, **params)
    plan = method.plan(q, k, v, call)
    plan.validate()
    weights = plan.weights()
    pairs = pairs_of(method, q, k, call)
    for b in range(shape.batch):
        for h in range(shape.heads):
            kv = h // shape.group
            groups = [members(pairs, b, kv, c, valid) for c in range(12)]
            for g in range(pairs.queries.sizes.shape[2]):
                centroid = pairs.queries.centroids[b, h, g]
                error = torch.tensor(
                    [log_error(centroid, k[b, kv, m], v[b, kv, m], 0.4) if len(m) else -math.inf
                     for m in groups]
                )  # fmt: skip
                taken = row_by_loops(method, pairs, (b, h, g), error)
                want = torch.zeros(shape.num_keys + 12)
                for c, m in enumerate(groups):
                    if c in taken:
                        want[m] = 1.0
                    elif len(m):
                        want[shape.num_keys + c] = len(m)
                of = pairs.queries.labels[b, h] == g
                if valid is not None and shape.num_queries == shape.num_keys:
                    of = of & valid[b]
                for row in weights[b, h][of]:
                    torch.testing.assert_close(row, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_output_is_attention_with_centroids(shape: Shape) -> None:
    q, k, v = shape.tensors()
    plan = SVGEAR(density=0.4, key_clusters=12).plan(q, k, v)
    keys = plan.keys
    assert keys.extra_k is not None
    assert keys.extra_v is not None
    joined = [torch.cat([k, keys.extra_k], 2), torch.cat([v, keys.extra_v], 2)]
    got = gs.attend(q, k, v, plan)
    assert_matches(got, attention(q, *joined, plan.weights()), tolerance(q, *joined))
    refreshed = plan.refresh(k, v).keys
    torch.testing.assert_close(refreshed.extra_k, keys.extra_k)
    torch.testing.assert_close(refreshed.extra_v, keys.extra_v)


@given(shapes(), st.sampled_from([0.1, 1.0, 40.0]))
def test_errors_in_logarithms(shape: Shape, scale: float) -> None:
    """No pair is lost or overflows, however far its logits lie apart."""
    q, k, v = shape.tensors()
    method = SVGEAR(key_clusters=5, query_clusters=3, iterations=2)
    call = gs.Call(scale=scale)
    pairs = pairs_of(method, q, k, call)
    got = log_replacement_error(k, v, pairs, scale)
    assert not got.isnan().any()
    b, h = shape.batch - 1, shape.heads - 1
    kv = h // shape.group
    for g in range(got.shape[2]):
        for c in range(got.shape[3]):
            of = members(pairs, b, kv, c, None)
            value = float(got[b, h, g, c])
            if len(of) <= 1:
                assert value == -math.inf
                continue
            want = log_error(pairs.queries.centroids[b, h, g], k[b, kv, of], v[b, kv, of], scale)
            # A logit's float32 rounding shifts the logarithm by as much, twice.
            size = float(
                (k[b, kv, of].norm(dim=-1) * pairs.queries.centroids[b, h, g].norm()).max()
            )
            assert value == pytest.approx(want, abs=1e-4 + 2e-6 * scale * size)


def test_routing_follows_the_error_and_not_the_mass() -> None:
    """Two clusters of equal mass: the one of identical tokens is left to its centroid."""
    g = torch.Generator().manual_seed(1)
    tight = torch.tensor([4.0, 0.0, 0.0, 0.0]).expand(64, -1)
    loose = torch.tensor([-4.0, 0.0, 0.0, 0.0]) + torch.randn(64, 4, generator=g) * 0.3
    k = torch.cat([tight, loose])[None, None]
    v = torch.cat([torch.ones(64, 4), torch.randn(64, 4, generator=g)])[None, None]
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]]).expand(32, -1)[None, None]
    plan = SVGEAR(
        density=0.52, min_ratio=0.0, key_clusters=2, query_clusters=1, iterations=20
    ).plan(q, k, v)
    assert plan.density == pytest.approx(65 / 128)
    assert bool((plan.weights()[0, 0, :, 64:128] == 1).all())
    out = gs.attend(q, k, v, plan).out
    torch.testing.assert_close(out.double(), attention(q, k, v).out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [2048, 4097])
def test_the_asked_density_is_met_with_virtual_keys_counted(num_tokens: int) -> None:
    q, k, v = Shape(1, 2, 1, num_tokens, num_tokens, 16, 1).tensors()
    got = []
    for density in (0.05, 0.1, 0.3, 0.6, 0.95, 1.0):
        plan = SVGEAR(density=density, iterations=3).plan(q, k, v)
        got.append(plan.density)
        assert abs(plan.density - density) <= 0.02
        assert plan.density == pytest.approx(
            float((plan.weights() > 0).sum(-1).double().mean()) / num_tokens
        )
    assert got == sorted(got)
    assert got[-1] == 1.0


def test_the_own_budget_is_svg2s_area_and_virtual_keys_come_on_top() -> None:
    q, k, v = Shape(1, 2, 1, 600, 600, 16, 1).tensors()
    theirs = gs.SVG2(mass=0.6).plan(q, k, v).weights() > 0
    ours = SVGEAR(mass=0.6).plan(q, k, v).weights()
    exact = (ours[..., :600] > 0).sum(-1)
    assert (exact <= theirs.sum(-1)).all()
    assert (exact >= theirs.sum(-1) - 40).all()  # at most what no small cluster fills
    assert torch.equal(ours.sum(-1), torch.full_like(ours.sum(-1), 600.0))


@pytest.mark.parametrize("params", [{"mass": 1.0}, {"min_ratio": 1.0}, {"density": 1.0}])
def test_a_full_budget_is_dense(params: dict[str, float]) -> None:
    q, k, v = Shape(2, 2, 2, 333, 333, 16, 2).tensors()
    plan = SVGEAR(**params).plan(q, k, v)
    assert plan.density == 1.0
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_centroids_beat_dropping_at_equal_density() -> None:
    g = torch.Generator().manual_seed(0)
    themes, values = torch.randn(2, 40, 16, generator=g)
    label = torch.randint(40, (1024,), generator=g)
    q, k, v = (
        (t[label] + 0.3 * torch.randn(1024, 16, generator=g))[None, None]
        for t in (themes, themes, values)
    )
    want = gs.sparse_attention(q, k, v, gs.Dense())
    ours = (gs.sparse_attention(q, k, v, SVGEAR(density=0.2)) - want).norm()
    theirs = (gs.sparse_attention(q, k, v, gs.SVG2(density=0.2)) - want).norm()
    assert float(ours) < float(theirs) / 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"density": 0.0}, "density=0.0 must be a number with 0 < density <= 1"),
        ({"mass": 2.0}, "mass=2.0 must be a number"),
        ({"min_ratio": -0.1}, "min_ratio=-0.1 must be a number with 0 <= min_ratio <= 1"),
        ({"gamma": -1.0}, "gamma=-1.0 must be a number with 0 <= gamma <= 10"),
        ({"gamma": float("nan")}, "gamma=nan must be a number"),
        ({"tile": 0}, "tile=0 must be an integer >= 1"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        gs.get_method("svg-ear", **params)


def test_virtual_keys_of_other_keys_are_refused() -> None:
    q, k, v = Shape(1, 2, 1, 300, 300, 16, 0).tensors()
    plan = gs.SVGEAR(density=0.3).plan(q, k, v)
    for other in (k[:, :, :200], k[:, :1]):
        with pytest.raises(gs.PlanError, match=r"stand for keys .* \[1, 2, 300\]"):
            plan.refresh(other, other)
    with pytest.raises(gs.PlanError, match="k is .* and v"):
        plan.refresh(k, v[..., :8])
    with pytest.raises(gs.PlanError, match="2 KV heads of dim 16, but k has 2 of dim 8"):
        gs.attend(q[..., :8], k[..., :8], v[..., :8], plan)
