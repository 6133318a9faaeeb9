"""MC-Sparse: the plan is the definition's, every rung of the ladder covers more mass."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.methods.mc_sparse import MCSparse
from gossamer.plan.rows import tile_queries
from gossamer.select import exact as module
from gossamer.testing import check_causal, check_full, check_valid
from oracle import attention

VARIANTS = [
    {"grouping": grouping, "block": block, "scores": scores}
    for grouping in ("pddp", "kmeans", "none")
    for block, scores in ((1, "exact"), (1, "pooled"), (32, "exact"), (128, "pooled"))
]
CAUSAL = [variant for variant in VARIANTS if variant["grouping"] == "none"]
SOME = settings(max_examples=6)


def name_of(variant: dict[str, object]) -> str:
    return "-".join(map(str, variant.values()))


def probabilities(shape: Shape, call: gs.Call, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Softmax over visible keys [B, H, N, S] in float64; padded queries and blind ones give 0."""
    q, k, _ = (x.double() for x in shape.tensors(dtype))
    logits = q @ k.repeat_interleave(shape.group, dim=1).mT * shape.dim**-0.5
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    if call.causal:
        seen = seen.tril(shape.num_keys - shape.num_queries)
    seen = seen.expand_as(logits)
    if call.key_valid is not None:
        seen = seen & call.key_valid[:, None, None]
    p = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    if call.key_valid is not None and shape.num_queries == shape.num_keys:
        p = p * call.key_valid[:, None, :, None]
    return p


def tile_sums(plan: gs.SparsePlan, x: torch.Tensor) -> torch.Tensor:
    """Sum x [B, H, N, S] over the queries of each tile: [B, H, T, S]."""
    index = tile_queries(plan).expand(*x.shape[:2], -1, -1)
    padded = torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2)
    slot = torch.where(index < 0, x.shape[2], index).flatten(2)
    rows = padded.gather(2, slot[..., None].expand(-1, -1, -1, x.shape[3]))
    return rows.unflatten(2, index.shape[2:]).sum(3)


def covered(method: MCSparse, shape: Shape, tensors: tuple[torch.Tensor, ...]) -> float:
    """Share of the exact softmax mass that the plan covers."""
    plan = method.plan(*tensors)
    q, k, _ = (x.double() for x in tensors)
    p = torch.softmax(q @ k.repeat_interleave(shape.group, dim=1).mT * shape.dim**-0.5, -1)
    return (p * (plan.weights() > 0)).sum(-1).mean().item()


@settings(max_examples=25)
@given(shapes(), st.sampled_from([0.1, 0.5]), st.booleans(), st.sampled_from(["pddp", "none"]))
def test_every_tile_reads_the_keys_of_greatest_mass(
    shape: Shape, density: float, padded: bool, grouping: str
) -> None:
    """The definition in float64: masses by a plain sum, top-K by a stable sort."""
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.7
        valid[:, 0] = True
    call = gs.Call(key_valid=valid)
    q, k, v = shape.tensors(torch.float64)
    plan = MCSparse(density=density, grouping=grouping, tile=32).plan(q, k, v, call)
    mass = tile_sums(plan, probabilities(shape, call))
    read = tile_sums(plan, (plan.weights() > 0).double()) > 0
    for b in range(shape.batch):
        keys = torch.arange(shape.num_keys) if valid is None else valid[b].nonzero()[:, 0]
        number = max(1, round(len(keys) * density))
        for h in range(shape.heads):
            for t in range(mass.shape[2]):
                order = mass[b, h, t, keys].argsort(descending=True, stable=True)
                want = keys[order[:number]].sort().values
                assert torch.equal(read[b, h, t].nonzero()[:, 0], want)


@settings(max_examples=25)
@given(shapes(), st.sampled_from([0.05, 0.3, 0.7]), st.booleans())
def test_causal_tiles_spend_visible_pairs_on_the_greatest_mass(
    shape: Shape, density: float, padded: bool
) -> None:
    """The definition: keys in order of mass, each paid with the queries that see it."""
    tile, shift = 32, shape.num_keys - shape.num_queries
    valid = torch.ones(shape.batch, shape.num_keys, dtype=torch.bool)
    if padded:
        valid = torch.rand(valid.shape, generator=shape.generator()) < 0.7
    call = gs.Call(causal=True, key_valid=valid)
    q, k, v = shape.tensors(torch.float64)
    plan = MCSparse(density=density, grouping="none", tile=tile).plan(q, k, v, call)
    mass = tile_sums(plan, probabilities(shape, call))
    keys = plan.keys
    for b, h, t in torch.cartesian_prod(*map(torch.arange, mass.shape[:3])).tolist():
        rows = range(t * tile, min((t + 1) * tile, shape.num_queries))
        cost = {
            j: sum(j <= i + shift for i in rows)
            for j in range(shape.num_keys)
            if valid[b, j] and j <= rows[-1] + shift
        }
        before = [j for j in cost if j <= rows[0] + shift]
        must = max(before) if before else min(cost, default=-1)
        order = sorted(cost, key=lambda j: (j != must, -float(mass[b, h, t, j]), j))
        want, spent, budget = [], 0, density * sum(cost.values())
        for j in order:
            if j == must or spent + cost[j] / 2 <= budget:
                want.append(j)
            spent += cost[j]
        start, count = int(keys.start[b, h, t]), int(keys.count[b, h, t])
        assert keys.index[start : start + count].tolist() == sorted(want)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_plans_are_valid_and_full_ones_dense(variant: dict[str, object]) -> None:
    short = torch.arange(333) < torch.tensor([[333], [40]])
    for shape, call in (
        (Shape(2, 2, 2, 333, 333, 16, 0), gs.Call(key_valid=short, text=(10, 40), seed=3)),
        (Shape(1, 1, 3, 100, 333, 20, 1), gs.Call()),
        (Shape(1, 1, 1, 1, 1, 8, 2), gs.Call()),
    ):
        for density in (0.05, 0.4):
            check_valid(MCSparse(density=density, **variant), shape.tensors(), call)
        check_full(MCSparse(density=1.0, **variant), shape.tensors(), call)


@pytest.mark.parametrize("variant", CAUSAL, ids=name_of)
@SOME
@given(shapes(), st.booleans(), st.sampled_from([0.05, 0.4, 1.0]))
def test_causal_plans_look_at_the_past_alone(
    variant: dict[str, object], shape: Shape, padded: bool, density: float
) -> None:
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.7
    call = gs.Call(causal=True, key_valid=valid)
    method = MCSparse(density=density, tile=32, **variant)
    check_causal(method, shape.tensors(), call)
    if density == 1.0:
        check_full(method, shape.tensors(), call)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_padding_changes_nothing(variant: dict[str, object]) -> None:
    """NaN in 150 padded tokens: plans of the valid ones are the same, tile for tile."""
    shape, pad = Shape(2, 2, 2, 237, 237, 16, 2), 150
    q, k, v = shape.tensors()
    method = MCSparse(density=0.2, **variant)
    alone = method.plan(q, k, v).weights()
    call = gs.Call(key_valid=(torch.arange(237 + pad) < 237)[None])
    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, pad), value=float("nan")) for x in shape.tensors()
    ]
    weights = method.plan(*padded, call).weights()
    assert torch.equal(weights[:, :, :237, :237], alone.expand_as(weights[:, :, :237, :237]))


@pytest.mark.parametrize("num_tokens", [2048, 4097])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 128])
def test_the_asked_density_is_met_and_grows(num_tokens: int, causal: bool, block: int) -> None:
    tensors = Shape(1, 1, 1, num_tokens, num_tokens, 8, 1).tensors()
    asked = (0.1, 0.3, 0.6)
    method = MCSparse(grouping="none", block=block)
    got = [replace(method, density=d).plan(*tensors, gs.Call(causal=causal)).density for d in asked]
    assert got == pytest.approx(asked, abs=0.02)
    assert got == sorted(got)


def scattered(seed: int = 0) -> tuple[Shape, tuple[torch.Tensor, ...]]:
    """Queries and keys of 16 kinds, in random order, so that neighbours have nothing in common."""
    shape = Shape(1, 2, 1, 1024, 1024, 16, seed)
    g = shape.generator()
    centre = 2.5 * torch.randn(1, 2, 16, 16, generator=g)
    kinds = [torch.randint(16, (1, 2, 1024, 1), generator=g).expand(-1, -1, -1, 16)] * 2
    noise = shape.tensors()
    q, k = (centre.gather(2, kind) + 0.7 * x for kind, x in zip(kinds, noise[:2], strict=True))
    return shape, (q, k, noise[2])


def test_every_rung_of_the_ladder_covers_more_mass() -> None:
    """Block, exact, token, grouping: the paper's ablation, at equal numbers of keys."""
    shape, tensors = scattered()
    ladder = [
        MCSparse(density=0.25, block=128, scores="pooled", grouping="none"),
        MCSparse(density=0.25, block=128, scores="exact", grouping="none"),
        MCSparse(density=0.25, block=1, scores="exact", grouping="none"),
        MCSparse(density=0.25, block=1, scores="exact", grouping="pddp"),
    ]
    got = [covered(method, shape, tensors) for method in ladder]
    assert got == sorted(got)
    assert got[3] > got[2] + 0.1  # grouping is what scattered queries need
    assert got[3] > 0.9
    kmeans = covered(replace(ladder[3], grouping="kmeans"), shape, tensors)
    assert kmeans > got[2] + 0.1


@settings(max_examples=10)
@given(shapes(), st.sampled_from(["pddp", "none"]), st.sampled_from([0.1, 0.4]))
def test_exact_scores_cover_at_least_what_pooled_ones_do(
    shape: Shape, grouping: str, density: float
) -> None:
    """A theorem for every tile, as rows hold the same number of keys."""
    q, k, v = shape.tensors(torch.float64)
    p = probabilities(shape, gs.Call())
    sums = []
    for scores in ("exact", "pooled"):
        plan = MCSparse(density=density, grouping=grouping, scores=scores, tile=16).plan(q, k, v)
        sums.append(tile_sums(plan, p * (plan.weights() > 0)).sum(-1))
    assert (sums[0] >= sums[1] - 1e-9).all()


def test_the_lowest_rung_is_block_top_k() -> None:
    q, k, v = Shape(2, 2, 2, 1500, 1500, 16, 5).tensors()
    got = MCSparse(density=0.3, block=128, scores="pooled", grouping="none").plan(q, k, v)
    want = gs.BlockTopK(density=0.3).plan(q, k, v)
    assert torch.equal(got.weights(), want.weights())


def test_ties_go_to_the_lower_index() -> None:
    x = torch.ones(1, 1, 300, 8)
    plan = MCSparse(density=0.1).plan(x, x, x)
    assert isinstance(plan.keys, gs.KeyTokens)
    assert torch.equal(plan.keys.index.view(3, 30), torch.arange(30).expand(3, -1).int())


def test_one_row_a_tile_and_only_the_last_tile_is_short() -> None:
    q, k, v = Shape(1, 2, 1, 1000, 1000, 16, 5).tensors()
    plan = MCSparse(density=0.15).plan(q, k, v)
    assert isinstance(plan.keys, gs.KeyTokens)
    assert plan.tile_row is None
    assert plan.keys.count.shape == (1, 2, 8)
    assert (plan.keys.count == 150).all()
    assert plan.query_index is not None
    assert (plan.query_index >= 0).sum(-1).tolist() == [[[128] * 7 + [104]] * 2]


def test_rows_take_a_share_of_their_own_valid_keys() -> None:
    q, k, v = Shape(2, 1, 1, 400, 400, 16, 5).tensors()
    valid = torch.arange(400) < torch.tensor([[400], [100]])
    plan = MCSparse(density=0.2, tile=64).plan(q, k, v, gs.Call(key_valid=valid))
    assert (plan.keys.count[0] == 80).all()
    assert (plan.keys.count[1] == 20).all()


def test_heads_are_known_by_their_global_index() -> None:
    """A rank that holds the last KV head alone plans what the whole does."""
    q, k, v = Shape(1, 2, 2, 300, 300, 16, 4).tensors()
    for grouping in ("pddp", "kmeans"):
        method = MCSparse(density=0.2, grouping=grouping, tile=32)
        whole = method.plan(q, k, v, gs.Call(num_heads=4)).weights()
        call = gs.Call(num_heads=4, head_offset=2)
        part = method.plan(q[:, 2:], k[:, 1:], v[:, 1:], call).weights()
        assert torch.equal(part, whole[:, 2:])


def test_what_is_held_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Shape(2, 2, 2, 300, 300, 16, 4).tensors(torch.float64)
    whole = MCSparse(density=0.2).plan(*tensors).weights()
    for chunk in (600_000, 50_000):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
        assert torch.equal(MCSparse(density=0.2).plan(*tensors).weights(), whole)


@pytest.mark.parametrize("scores", ["exact", "pooled"])
@pytest.mark.parametrize("text", [None, (0, 30), (240, 270), (100, 130), (0, 300)])
@pytest.mark.parametrize("padded", [False, True])
def test_an_anchor_returns_full_attention_and_the_plan(
    text: tuple[int, int] | None, padded: bool, scores: str
) -> None:
    q, k, v = Shape(2, 2, 2, 300, 300, 16, 4).tensors()
    valid = None
    if padded:
        valid = torch.arange(300) < torch.tensor([[300], [270]])
    call = gs.Call(text=text, key_valid=valid)
    method = MCSparse(density=0.2, scores=scores)
    plan, out = method.anchor(q, k, v, call)
    assert torch.equal(plan.weights(), method.plan(q, k, v, call).weights())
    want = attention(q, k, v, None if valid is None else valid[:, None, None]).out
    rows = torch.ones_like(want[..., :1], dtype=torch.bool)
    if valid is not None:
        rows = rows & valid[:, None, :, None]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double() * rows, want * rows, rtol=1e-5, atol=1e-5)


def test_grouped_queries_have_no_causal_form_and_the_error_says_what_has() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 8, 0).tensors()
    for grouping in ("pddp", "kmeans"):
        with pytest.raises(gs.UnsupportedError, match="positions.*grouping='none' has one"):
            MCSparse(grouping=grouping).plan(q, k, v, gs.Call(causal=True))
    assert MCSparse(grouping="none").plan(q, k, v, gs.Call(causal=True)).causal
    assert MCSparse() == MCSparse(grouping="pddp")
    assert replace(MCSparse(grouping="none"), grouping="pddp").causal_reason


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"density": 0.0}, "density=0.0 must be a number with 0 < density <= 1"),
        ({"grouping": "svd"}, r"grouping='svd' must be one of \('pddp', 'kmeans', 'none'\)"),
        ({"scores": "mean"}, r"scores='mean' must be one of \('exact', 'pooled'\)"),
        ({"block": 0}, "block=0 must be an integer >= 1"),
        ({"tile": 1.5}, "tile=1.5 must be an integer >= 1"),
        ({"iterations": True}, "iterations=True must be an integer >= 1"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        MCSparse(**params)
