"""SpargeAttn's selection against its definition in plain loops, and the faults it must not have."""

import math

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.group import similarity
from gossamer.group.similarity import self_similarity
from gossamer.methods.sparge import SpargeAttn
from gossamer.testing import check_causal, check_full, check_valid

SMALL = {"tile": 16, "block": 8}


def block_mask(plan: gs.SparsePlan) -> torch.Tensor:
    assert isinstance(plan.keys, gs.KeyBlocks)
    return plan.keys.to_mask(plan.num_keys)


def cosine_mean(x: torch.Tensor) -> float:
    """Return the mean cosine over all ordered pairs of tokens, equal ones included."""
    unit = x.double() / x.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return float((unit @ unit.T).mean())


def oracle(q, k, valid, call, mass: float, threshold: float) -> list[set[int]]:
    """Return the blocks each tile keeps, of one head, from the definition."""
    tile, block = 16, 8
    num_queries, num_keys = len(q), len(k)
    shift = num_keys - num_queries
    self_attention = num_queries == num_keys
    k = k.double() - k[valid].double().mean(0)
    keys = [
        [j for j in range(c, min(c + block, num_keys)) if valid[j]]
        for c in range(0, num_keys, block)
    ]
    result = []
    for begin in range(0, num_queries, tile):
        rows = [
            i
            for i in range(begin, min(begin + tile, num_queries))
            if not self_attention or valid[i]
        ]
        last = min(begin + tile, num_queries) - 1 + shift
        seen = [c for c, js in enumerate(keys) if js and (not call.causal or c * block <= last)]
        if not rows:
            result.append(set())
            continue
        always = {c for c in seen if cosine_mean(k[keys[c]]) < threshold}
        if cosine_mean(q[rows]) < threshold:
            always = set(seen)
        mean = q[rows].double().mean(0)
        logit = {
            c: float(mean @ k[keys[c]].mean(0)) / math.sqrt(len(mean)) for c in set(seen) - always
        }
        share = {c: math.exp(x) / sum(map(math.exp, logit.values())) for c, x in logit.items()}
        kept, covered = set(always), 0.0
        for c in sorted(share, key=lambda c: -share[c]):
            if covered < mass:
                kept.add(c)
                covered += share[c]
        result.append(kept)
    return result


def similar_tokens(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Return tokens of which some blocks are alike inside and some are not."""
    q, k, v = shape.tensors()
    g = shape.generator()

    def mixed(x: torch.Tensor, size: int) -> torch.Tensor:
        spread = torch.rand(*x.shape[:2], -(-x.shape[2] // size), 1, generator=g)
        center = torch.randn(*x.shape[:2], -(-x.shape[2] // size), x.shape[3], generator=g)
        spread, center = (
            y.repeat_interleave(size, dim=2)[:, :, : x.shape[2]] for y in (spread, center)
        )
        return 2 * center + 3 * spread * x

    return mixed(q, 16), mixed(k, 8), v


LEFT = torch.arange(100) >= torch.tensor([[0], [41]])
RIGHT = torch.arange(100) < torch.tensor([[100], [43]])
CASES = [
    (Shape(1, 1, 2, 100, 100, 8, 0), gs.Call()),
    (Shape(1, 1, 2, 37, 61, 8, 1), gs.Call()),
    (Shape(2, 1, 2, 100, 100, 8, 2), gs.Call(key_valid=RIGHT)),
    (Shape(2, 1, 1, 64, 100, 8, 3), gs.Call(key_valid=LEFT)),
    (Shape(1, 2, 1, 96, 96, 8, 4), gs.Call(causal=True)),
    (Shape(1, 1, 2, 37, 61, 8, 5), gs.Call(causal=True)),
    (Shape(2, 1, 1, 100, 100, 8, 6), gs.Call(causal=True, key_valid=RIGHT)),
    (Shape(1, 1, 1, 3, 3, 8, 8), gs.Call()),
]


@pytest.mark.parametrize(("shape", "call"), CASES)
@pytest.mark.parametrize("threshold", [-0.1, 0.5, 0.8])
def test_the_plan_is_the_definition(shape: Shape, call: gs.Call, threshold: float) -> None:
    q, k, v = similar_tokens(shape)
    plan = SpargeAttn(mass=0.6, similarity=threshold, **SMALL).plan(q, k, v, call)
    plan.validate()
    got = block_mask(plan)
    group = q.shape[1] // k.shape[1]
    for b in range(shape.batch):
        valid = torch.ones(shape.num_keys, dtype=torch.bool)
        if call.key_valid is not None:
            valid = call.key_valid[b]
        for h in range(shape.heads):
            want = oracle(q[b, h], k[b, h // group], valid, call, 0.6, threshold)
            for r, kept in enumerate(want):
                row = set(got[b, h, r].nonzero().flatten().tolist())
                if not call.causal:
                    assert row == kept or not kept
                elif kept:  # the block that all of the tile's queries see is kept beside them
                    shift = shape.num_keys - shape.num_queries
                    assert row == kept | {max(r * 16 + shift, 0) // 8}


def test_the_rule_bites_in_these_cases() -> None:
    """The oracle's cases hold alike and unlike blocks on both sides."""
    q, k, _ = similar_tokens(CASES[2][0])
    for x, size in ((q, 16), (k, 8)):
        alike = self_similarity(x, size) > 0.5
        assert alike.any()
        assert not alike.all()


def test_self_similarity_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 2, 45, 8)
    x[0, 0, 3] = 0.0
    valid = torch.rand(2, 45) < 0.7
    valid[1, 8:16] = False
    whole = self_similarity(x.masked_fill(~valid[:, None, :, None], float("nan")), 8, valid=valid)
    for b in range(2):
        for h in range(2):
            for c in range(6):
                piece = slice(8 * c, 8 * c + 8)
                tokens = x[b, h, piece][valid[b, piece]]
                want = cosine_mean(tokens) if len(tokens) else 0.0
                assert float(whole[b, h, c]) == pytest.approx(want, abs=1e-6)
    monkeypatch.setattr(similarity, "_CHUNK_BYTES", 4 * 4 * 8 * 16)
    assert torch.equal(self_similarity(x, 8, valid=valid), whole)


def test_the_crossing_block_is_included() -> None:
    """Pooled shares .5, .3, .2: covering .6 takes two blocks; the public count takes one."""
    k = torch.tensor([0.5, 0.3, 0.2]).log().repeat_interleave(8)[None, None, :, None]
    q = torch.ones(1, 1, 24, 1)
    kept = block_mask(SpargeAttn(mass=0.6, similarity=-1.0, **SMALL).plan(q, k, k))
    assert kept[0, 0].tolist() == [[True, True, False]] * 2


def one_unlike_block() -> tuple[torch.Tensor, ...]:
    """Return tokens alike in every block of 8 keys but block 5, whose key mean is about zero.

    The other keys stand on an axis, at -10 in odd blocks and at 10 in even ones.
    """
    q = torch.ones(1, 1, 64, 4)
    k = torch.zeros(1, 1, 64, 4)
    k[..., 0] = torch.where(torch.arange(64) // 8 % 2 == 0, 10.0, -10.0)
    k[:, :, 40:48] = torch.randn(8, 4)
    return q, k, k


def test_unlike_blocks_are_rows_and_columns() -> None:
    q, k, v = one_unlike_block()
    q[:, :, 16:32] = torch.randn(16, 4)
    kept = block_mask(SpargeAttn(mass=0.1, similarity=0.9, **SMALL).plan(q, k, v))[0, 0]
    assert kept[1].all()
    assert kept[:, 5].all()
    assert (kept[[0, 2, 3]].sum(-1) == 2).all()  # the others: the best block beside it


def test_keys_are_smoothed_before_they_are_compared() -> None:
    """A common offset makes any keys look alike; without it they are not."""
    g = torch.Generator().manual_seed(0)
    q = torch.ones(1, 1, 64, 8)
    k = torch.randn(1, 1, 64, 8, generator=g) + 100.0
    assert (self_similarity(k, 8) > 0.9).all()
    assert SpargeAttn(mass=0.1, similarity=0.6, **SMALL).plan(q, k, k).density == 1.0


def test_published_defaults() -> None:
    assert SpargeAttn().params() | {"tile": 128, "block": 64} == SpargeAttn().params()
    assert (SpargeAttn().density, SpargeAttn().similarity) == (0.5, -0.1)
    assert (SpargeAttn(mass=0.98).density, SpargeAttn(mass=0.98).similarity) == (None, 0.6)


@pytest.mark.parametrize("threshold", [None, 1.0])
@pytest.mark.parametrize("lengths", [(2048, 2048), (4097, 4097), (1500, 2048), (1500, 4097)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_asked_density_is_met_and_grows(
    lengths: tuple[int, int], causal: bool, threshold: float | None
) -> None:
    """Also where the threshold would have everything computed."""
    q, k, v = Shape(1, 1, 1, *lengths, 8, 1).tensors()
    last = torch.zeros(1, dtype=torch.bool)
    for density in (0.15, 0.3, 0.6, 0.8):
        method = gs.get_method("sparge", density=density, similarity=threshold)
        plan = method.plan(q, k, v, gs.Call(causal=causal))
        assert abs(plan.density - density) <= 0.02
        mask = block_mask(plan)
        assert not (last & ~mask).any()
        last = mask


def test_under_a_density_unlike_blocks_come_first() -> None:
    q, k, v = one_unlike_block()
    kept = block_mask(SpargeAttn(density=0.25, similarity=0.9, **SMALL).plan(q, k, v))[0, 0]
    assert kept[:, 5].all()
    assert (kept.sum(-1) == 2).all()
    assert not block_mask(SpargeAttn(density=0.25, **SMALL).plan(q, k, v))[0, 0][:, 5].any()


METHODS = [
    SpargeAttn(mass=1.0, **SMALL),
    SpargeAttn(density=1.0),
    SpargeAttn(mass=0.1, similarity=1.0),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("shape", "call"), CASES)
def test_full_budgets_are_dense(method: SpargeAttn, shape: Shape, call: gs.Call) -> None:
    check_causal(method, shape.tensors(), call)
    if call.key_valid is None:
        check_full(method, shape.tensors(), call)


def test_causal_calls_are_causal_inside_the_diagonal_block() -> None:
    check_causal(
        SpargeAttn(density=0.5), Shape(1, 1, 2, 300, 300, 16, 0).tensors(), gs.Call(causal=True)
    )


def test_padding_and_neighbours_change_nothing() -> None:
    for causal in (False, True):
        q, k, v = similar_tokens(Shape(2, 2, 2, 237, 237, 16, 2))
        method = SpargeAttn(mass=0.6, similarity=0.5, **SMALL)
        alone = method.plan(q, k, v, gs.Call(causal=causal)).weights()
        assert alone.mean() < 0.9
        for pad in (1, 40):
            valid = torch.arange(237 + pad).expand(2, -1) < 237
            q_, k_, v_ = (
                torch.nn.functional.pad(x, (0, 0, 0, pad), value=float("nan")) for x in (q, k, v)
            )
            plan = check_valid(
                method, (q_, k_, v_), gs.Call(key_valid=valid, causal=causal, head_offset=3)
            )
            assert torch.equal(plan.weights()[..., :237, :237], alone)
        part = method.plan(q[1:, 2:], k[1:, 1:], v[1:, 1:], gs.Call(causal=causal)).weights()
        assert torch.equal(part, alone[1:, 2:])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mass": 0.0}, "mass=0.0"),
        ({"mass": 0.5, "density": 0.5}, "not both"),
        ({"similarity": 1.5}, "similarity=1.5"),
        ({"similarity": float("nan")}, "similarity=nan"),
        ({"similarity": True}, "similarity=True"),
        ({"block": 0}, "block=0"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        SpargeAttn(**params)
