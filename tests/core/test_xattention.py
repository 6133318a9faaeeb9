"""XAttention against its definition in plain loops, and the faults it must not have."""

import math

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.group import antidiagonal
from gossamer.group.antidiagonal import Strides, antidiagonal_mass
from gossamer.methods.xattention import XAttention
from gossamer.testing import check_causal, check_full, check_valid

SMALL = {"stride": 4, "tile": 16, "block": 8}


def block_mask(plan: gs.SparsePlan) -> torch.Tensor:
    assert isinstance(plan.keys, gs.KeyBlocks)
    return plan.keys.to_mask(plan.num_keys)


def group_tokens(x: torch.Tensor, valid: list[bool], group: int, stride: int) -> torch.Tensor:
    """Return the stride tokens of one group; missing ones are the mean of those there are."""
    places = range(group * stride, (group + 1) * stride)
    there = [i for i in places if i < len(valid) and valid[i]]
    if not there:
        return torch.zeros(stride, x.shape[-1], dtype=torch.float64)
    mean = x[there].double().mean(0)
    return torch.stack([x[i].double() if i in there else mean for i in places])


def oracle(q: torch.Tensor, k: torch.Tensor, call: gs.Call, row: int, sizes: dict[str, int]):
    """Return the block masses [R][C] of one head, from the definition."""
    stride, tile, block = (sizes[name] for name in ("stride", "tile", "block"))
    num_queries, num_keys = len(q), len(k)
    shift = num_keys - num_queries
    valid_k = [True] * num_keys
    if call.key_valid is not None:
        valid_k = call.key_valid[row % len(call.key_valid)].tolist()
    valid_q = valid_k if num_queries == num_keys else [True] * num_queries
    rows, columns = -(-num_queries // tile), -(-num_keys // block)
    mass = torch.zeros(rows, columns, dtype=torch.float64)
    weights = torch.zeros(rows, dtype=torch.float64)
    for a in range(-(-num_queries // stride)):
        num = sum(valid_q[a * stride : (a + 1) * stride])
        weights[a * stride // tile] += num
        if not num:
            continue
        qs = group_tokens(q, valid_q, a, stride)
        last = min((a + 1) * stride, num_queries) - 1 + shift
        shares = {}
        for b in range(-(-num_keys // stride)):
            keys = [j for j in range(b * stride, min((b + 1) * stride, num_keys)) if valid_k[j]]
            if not keys or (call.causal and keys[0] > last):
                continue
            ks = group_tokens(k, valid_k, b, stride)
            dots = [float(qs[stride - 1 - i] @ ks[i]) for i in range(stride)]
            logit = sum(dots) / (stride * math.sqrt(q.shape[-1]))
            shares[b] = len(keys) * math.exp(logit)
        for b, share in shares.items():
            mass[a * stride // tile, b * stride // block] += num * share / sum(shares.values())
    return mass / weights.clamp(min=1)[:, None]


def heads_of(q: torch.Tensor, k: torch.Tensor):
    """Yield batch row, head and the head's queries and keys."""
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            yield b, h, q[b, h], k[b, h // group]


LEFT = torch.arange(100) >= torch.tensor([[0], [41]])
RIGHT = torch.arange(100) < torch.tensor([[100], [43]])
CASES = [
    (Shape(1, 1, 2, 100, 100, 8, 0), gs.Call()),
    (Shape(1, 1, 2, 37, 61, 8, 1), gs.Call()),
    (Shape(2, 1, 2, 100, 100, 8, 2), gs.Call(key_valid=RIGHT)),
    (Shape(2, 1, 1, 64, 100, 8, 3), gs.Call(key_valid=LEFT)),
    (Shape(1, 2, 1, 96, 96, 8, 4), gs.Call(causal=True)),
    (Shape(1, 1, 2, 37, 61, 8, 5), gs.Call(causal=True)),
    (Shape(2, 1, 1, 100, 100, 8, 6), gs.Call(causal=True, key_valid=LEFT)),
    (Shape(2, 1, 1, 100, 100, 8, 7), gs.Call(causal=True, key_valid=RIGHT)),
    (Shape(1, 1, 1, 3, 3, 8, 8), gs.Call()),
    (Shape(2, 1, 1, 63, 100, 8, 9), gs.Call(causal=True, key_valid=LEFT)),
]


@pytest.mark.parametrize(("shape", "call"), CASES)
@pytest.mark.parametrize("mass", [0.3, 0.8])
def test_the_plan_is_the_definition(shape: Shape, call: gs.Call, mass: float) -> None:
    q, k, v = shape.tensors()
    q = 3 * q  # masses that differ
    plan = XAttention(mass=mass, **SMALL).plan(q, k, v, call)
    plan.validate()
    got = block_mask(plan)
    shift = shape.num_keys - shape.num_queries
    for b, h, queries, keys in heads_of(q, k):
        masses = oracle(queries, keys, call, b, SMALL)
        for r, row in enumerate(masses.tolist()):
            if sum(row) == 0:
                continue  # a tile of padding
            possible = [c for c, share in enumerate(row) if share > 0]
            kept = set()
            if call.causal:
                first, last = r * 16 + shift, min(r * 16 + 15 + shift, shape.num_keys - 1)
                kept = {possible[0]} | {c for c in possible if first // 8 <= c <= last // 8}
            covered = sum(row[c] for c in kept)
            for c in sorted(possible, key=lambda c: -row[c]):
                if covered < mass * sum(row) and c not in kept:
                    kept.add(c)
                    covered += row[c]
            if call.key_valid is not None and call.causal:
                # The key before the tile may be padding: then an earlier block is kept for it.
                assert kept <= set(got[b, h, r].nonzero().flatten().tolist())
            else:
                assert kept == set(got[b, h, r].nonzero().flatten().tolist())
            assert covered >= mass * sum(row)  # the crossing block is included


@pytest.mark.parametrize(("shape", "call"), CASES)
def test_the_estimate_is_the_definition(shape: Shape, call: gs.Call) -> None:
    q, k, _ = shape.tensors()
    strides = Strides(**SMALL, scale=shape.dim**-0.5, causal=call.causal)
    valid_q = call.key_valid if shape.num_queries == shape.num_keys else None
    got = antidiagonal_mass(q, k, strides, valid_q=valid_q, valid_k=call.key_valid)
    for b, h, queries, keys in heads_of(q, k):
        want = oracle(queries, keys, call, b, SMALL)
        torch.testing.assert_close(got[b, h].double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True])
def test_work_cut_into_chunks_selects_the_same(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the public code a whole number of chunks hides every chunk but a query's own."""
    q, k, v = Shape(1, 1, 2, 128, 128, 8, 0).tensors()
    method, call = XAttention(mass=0.7, **SMALL), gs.Call(causal=causal)
    whole = block_mask(method.plan(q, k, v, call))
    for rows in (4, 8, 32):  # query groups a chunk: 128 tokens are a multiple of each
        monkeypatch.setattr(antidiagonal, "_CHUNK_BYTES", 4 * 2 * 32 * rows)
        assert torch.equal(block_mask(method.plan(q, k, v, call)), whole)


@pytest.mark.parametrize("num_tokens", [1000, 1003, 2048, 5])
def test_the_space_behind_the_last_key_has_no_mass(num_tokens: int) -> None:
    """Keys far below zero logit: zeros filled in would take nearly everything."""
    q = torch.ones(1, 1, num_tokens, 8)
    strides = Strides(stride=8, tile=128, block=128, scale=1.0, causal=False)
    got = antidiagonal_mass(q, -q, strides, valid_q=None, valid_k=None)
    size = [min(128, num_tokens - begin) for begin in range(0, num_tokens, 128)]
    want = torch.tensor(size) / num_tokens  # keys are alike, so mass is the number of keys
    torch.testing.assert_close(got, want.expand_as(got))


def test_the_sink_is_a_column_not_a_row() -> None:
    q, k, v = Shape(1, 1, 1, 512, 512, 8, 0).tensors()
    k[:, :, :64] = -100 * q.mean()  # the first blocks are worth nothing
    q, k = q.abs(), torch.cat([-9 * k[:, :, :64].abs(), k[:, :, 64:]], dim=2)
    sizes = {"stride": 4, "tile": 64, "block": 64}
    without = block_mask(XAttention(mass=0.3, **sizes).plan(q, k, v))[0, 0]
    assert not without[:, 0].any()  # nothing is forced where nothing is causal
    with_sink = block_mask(XAttention(mass=0.3, keep_sink=True, **sizes).plan(q, k, v))[0, 0]
    assert with_sink[:, 0].all()
    assert not with_sink[0].all()
    assert torch.equal(with_sink[:, 1:], without[:, 1:])  # it holds no mass, so it replaces none


def test_causal_sink_and_diagonal_are_counted_first() -> None:
    q, k, v = Shape(1, 1, 1, 256, 256, 8, 0).tensors()
    plan = XAttention(mass=1e-6, stride=4, tile=16, block=16).plan(q, k, v, gs.Call(causal=True))
    want = torch.eye(16, dtype=torch.bool)
    want[:, 0] = True
    assert torch.equal(block_mask(plan)[0, 0], want)


def test_a_key_that_a_mean_hides_is_found() -> None:
    """One strong key among opposite ones averages to nothing, but lies on an anti-diagonal."""
    g = torch.Generator().manual_seed(0)
    q = torch.ones(1, 1, 512, 16)
    k = 0.1 * torch.randn(1, 1, 512, 16, generator=g)
    k[:, :, 200] = 40.0
    k[:, :, 210:250] = -1.0
    assert k[:, :, 192:256].mean() < k[:, :, :64].mean().abs()
    kept = block_mask(XAttention(mass=0.5, tile=64, block=64).plan(q, k, k))[0, 0]
    assert kept[:, 3].all()
    assert kept.sum() == len(kept)


METHODS = [XAttention(mass=1.0, **SMALL), XAttention(density=1.0), XAttention(mass=1.0)]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("shape", "call"), CASES)
def test_full_budgets_are_dense(method: XAttention, shape: Shape, call: gs.Call) -> None:
    if call.causal or call.key_valid is None:
        check_causal(method, shape.tensors(), call)
    if call.key_valid is None:
        check_full(method, shape.tensors(), call)


def test_weak_mass_that_rounds_to_zero_is_still_a_block() -> None:
    q = torch.ones(1, 1, 256, 16)
    k = torch.where(torch.arange(256)[:, None] < 128, 30.0, -30.0).expand(1, 1, 256, 16)
    for method in (XAttention(density=1.0), XAttention(mass=1.0)):
        assert method.plan(q, k, k).density == 1.0


@pytest.mark.parametrize("lengths", [(2048, 2048), (4097, 4097), (1500, 2048), (1500, 4097)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_asked_density_is_met_and_grows(lengths: tuple[int, int], causal: bool) -> None:
    q, k, v = Shape(1, 1, 1, *lengths, 8, 1).tensors()
    last = torch.zeros(1, dtype=torch.bool)
    for density in (0.15, 0.3, 0.6, 0.8):
        plan = gs.get_method("xattention", density=density).plan(q, k, v, gs.Call(causal=causal))
        assert abs(plan.density - density) <= 0.02
        mask = block_mask(plan)
        assert not (last & ~mask).any()
        last = mask


def test_rows_keep_equal_shares() -> None:
    """Under a density the budget is each row's, not the head's."""
    q, k, v = Shape(1, 2, 1, 1024, 1024, 8, 1).tensors()
    q[:, :, 512:] *= 20  # half of the rows have far stronger scores
    kept = block_mask(XAttention(density=0.3, tile=64, block=64).plan(q, k, v)).sum(-1)
    assert kept.max() - kept.min() <= 1


def test_padding_and_neighbours_change_nothing() -> None:
    for causal in (False, True):
        q, k, v = Shape(2, 2, 2, 237, 237, 16, 2).tensors()
        method = XAttention(mass=0.6, **SMALL)
        alone = method.plan(q, k, v, gs.Call(causal=causal)).weights()
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


def test_scale_and_half_precision() -> None:
    q, k, v = Shape(1, 1, 1, 256, 256, 16, 2).tensors()
    method = XAttention(mass=0.6, **SMALL)
    scaled = method.plan(q, k, v, gs.Call(scale=1.0))
    assert torch.equal(block_mask(scaled), block_mask(method.plan(4 * q, k, v)))  # 4 = sqrt(16)
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(
        block_mask(method.plan(*low)), block_mask(method.plan(*[x.float() for x in low]))
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mass": 0.0}, "mass=0.0"),
        ({"mass": 1.5}, "mass=1.5"),
        ({"stride": 0}, "stride=0"),
        ({"stride": 7}, "block=128 must be a multiple of stride=7"),
        ({"tile": 60}, "tile=60 must be a multiple of stride=8"),
        ({"density": 2.0}, "density=2.0"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        XAttention(**params)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [64, 61])
@pytest.mark.parametrize(("begin", "end"), [(0, 16), (3, 9), (9, 16)])
def test_rows_of_groups_hold_their_phases(padded: bool, length: int, begin: int, end: int) -> None:
    """What one product on a GPU reads is what the products of the phases read."""
    x = torch.randn(2, 3, length, 5)
    valid = torch.rand(2, length) < 0.6 if padded else None
    groups = antidiagonal._Groups(x, 4, valid)
    phases = torch.stack([groups.phase(at, begin, end) for at in range(4)], dim=3)
    rows = groups.rows(begin, end, backwards=False)
    torch.testing.assert_close(rows, phases.flatten(3))
    rows = groups.rows(begin, end, backwards=True)
    torch.testing.assert_close(rows, phases.flip(3).flatten(3))
