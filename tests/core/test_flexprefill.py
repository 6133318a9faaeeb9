"""FlexPrefill against its definition in plain loops, and the faults it must not have."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape
from gossamer.methods.flexprefill import FlexPrefill, divergence
from gossamer.testing import check_causal, check_full, check_valid, visible

LEFT = torch.arange(100) >= torch.tensor([[0], [41]])
RIGHT = torch.arange(100) < torch.tensor([[100], [43]])
CASES = [
    (Shape(1, 2, 2, 100, 100, 8, 0), gs.Call()),
    (Shape(1, 1, 2, 37, 61, 8, 1), gs.Call()),
    (Shape(1, 1, 1, 61, 37, 8, 1), gs.Call()),
    (Shape(2, 1, 2, 100, 100, 8, 2), gs.Call(key_valid=RIGHT)),
    (Shape(2, 1, 1, 64, 100, 8, 3), gs.Call(key_valid=LEFT)),
    (Shape(1, 2, 1, 96, 96, 8, 4), gs.Call(causal=True)),
    (Shape(1, 1, 2, 37, 61, 8, 5), gs.Call(causal=True)),
    (Shape(2, 1, 1, 100, 100, 8, 6), gs.Call(causal=True, key_valid=RIGHT)),
    (Shape(1, 1, 1, 3, 3, 8, 8), gs.Call()),
]
SMALL = {"tile": 16, "block": 8, "min_budget": 9}


def block_mask(plan: gs.SparsePlan) -> torch.Tensor:
    assert isinstance(plan.keys, gs.KeyBlocks)
    return plan.keys.to_mask(plan.num_keys)


def fewest(mass: dict, share: float) -> set:
    """Return the fewest entries, greatest first, that reach a share of the total."""
    kept, covered, total = set(), 0.0, sum(mass.values())
    for entry in sorted(mass, key=lambda entry: -mass[entry]):
        if covered < share * total:
            kept.add(entry)
            covered += mass[entry]
    return kept


class Head:
    """One head of the definition, in float64 and plain loops; 16 queries a tile, 8 keys a block."""

    def __init__(self, q, k, seen: torch.Tensor, queries: list[int], keys: list[int], causal: bool):
        self.q, self.k, self.seen = q.double(), k.double(), seen
        self.queries, self.keys = queries, keys
        self.scale = 1 / math.sqrt(q.shape[1])
        self.shift = len(k) - len(q)
        begin = max(len(queries) - 16, 0)
        self.looked = queries[begin:] if causal else queries[begin // 2 :][:16]
        logits = (self.q @ self.k.T * self.scale).masked_fill(~seen, -math.inf)
        self.attention = logits.softmax(-1).nan_to_num(0.0)
        self.blocks: dict[int, list[int]] = {}
        for j in keys:
            self.blocks.setdefault(j // 8, []).append(j)

    def pooled(self, rows: list[int], blocks: list[int]) -> dict[int, float]:
        """Return the softmax of pooled logits over blocks."""
        mean = self.q[rows].mean(0)
        weight = {
            c: len(self.blocks[c])
            * math.exp(float(mean @ self.k[self.blocks[c]].mean(0)) * self.scale)
            for c in blocks
        }
        return {c: w / sum(weight.values()) for c, w in weight.items()}

    def distance(self) -> float:
        """Return the square root of the divergence of exact and pooled attention."""
        guess = self.pooled(self.looked, list(self.blocks))
        total = 0.0
        for c, p in guess.items():
            e = float(self.attention[self.looked][:, self.blocks[c]].sum()) / len(self.looked)
            for x in (p, e):
                total += x * math.log(2 * x / (p + e)) / 2 if x > 0 else 0.0
        return math.sqrt(max(total, 0.0))

    def tiles(self) -> dict[int, list[int]]:
        """Return the valid queries of each tile that has one."""
        tiles: dict[int, list[int]] = {}
        for i in self.queries:
            tiles.setdefault(i // 16, []).append(i)
        return tiles

    def choose(self, mass: float, aware: bool) -> dict[int, set[int]]:
        """Return the blocks of each tile."""
        shares = {}
        for t in self.tiles():
            rows = range(16 * t, min(16 * t + 16, len(self.q)))
            open_ = [c for c in self.blocks if self.seen[list(rows)][:, self.blocks[c]].any()]
            shares[t] = self.pooled(self.tiles()[t], open_) if open_ else {}
        columns = {
            c: float(self.attention[self.looked][:, js].sum()) for c, js in self.blocks.items()
        }
        offsets: dict[int, float] = {}
        for i in self.looked:
            for j in self.keys:
                d = i + self.shift - j
                offsets[d] = offsets.get(d, 0.0) + float(self.attention[i, j])
        bands: dict[int, float] = {}
        for d, p in offsets.items():
            bands[d // 8] = bands.get(d // 8, 0.0) + p
        if aware:
            flat = {(t, c): p for t, share in shares.items() for c, p in share.items()}
            taken = fewest(flat, mass)
        else:
            best, lines = fewest(columns, mass), fewest(bands, mass)
            taken = {(t, c) for t in shares for c in best}
            for t, rows in self.tiles().items():
                taken |= {
                    (t, j // 8)
                    for i in rows
                    for j in self.keys
                    if (i + self.shift - j) // 8 in lines
                }
        result = {}
        for t, share in shares.items():
            rank = share
            if not aware:
                rows = self.tiles()[t]
                total = len(self.looked) * len(rows)
                band = {
                    c: sum(
                        offsets.get(i + self.shift - j, 0.0) for i in rows for j in self.blocks[c]
                    )
                    for c in share
                }
                rank = {c: max(columns[c] / len(self.looked), band[c] / total) for c in share}
            kept = {c for c in share if (t, c) in taken}
            kept |= set(sorted(rank, key=lambda c: -rank[c])[:2])  # 9 keys are two blocks
            kept |= {min(share)} if share else set()
            kept |= {(i + self.shift) // 8 for i in self.tiles()[t]} & set(share)
            result[t] = kept
        return result


def heads_of(shape: Shape, call: gs.Call, q: torch.Tensor, k: torch.Tensor):
    """Yield batch row, head and the oracle's head."""
    for b in range(shape.batch):
        seen = visible(call, shape.num_queries, shape.num_keys)
        seen = torch.tensor(True) if seen is None else seen[b % len(seen), 0]
        seen = seen.expand(shape.num_queries, shape.num_keys).clone()
        keys, queries = list(range(shape.num_keys)), list(range(shape.num_queries))
        if call.key_valid is not None:
            keys = call.key_valid[b].nonzero().flatten().tolist()
            queries = keys if shape.num_queries == shape.num_keys else queries
        for h in range(shape.heads):
            yield b, h, Head(q[b, h], k[b, h // shape.group], seen, queries, keys, call.causal)


@pytest.mark.parametrize(("shape", "call"), CASES)
@pytest.mark.parametrize("tau", [0.0, 1.0])
@pytest.mark.parametrize("mass", [0.4, 0.8])
def test_the_plan_is_the_definition(shape: Shape, call: gs.Call, tau: float, mass: float) -> None:
    q, k, v = shape.tensors()
    q = 3 * q
    plan = FlexPrefill(mass=mass, tau=tau, **SMALL).plan(q, k, v, call)
    plan.validate()
    for b, h, head in heads_of(shape, call, q, k):
        for t, kept in head.choose(mass, aware=tau == 1.0).items():
            assert set(block_mask(plan)[b, h, t].nonzero().flatten().tolist()) == kept


@pytest.mark.parametrize(("shape", "call"), CASES)
def test_heads_are_told_apart_by_the_divergence(shape: Shape, call: gs.Call) -> None:
    q, k, _ = shape.tensors()
    distances = {(b, h): head.distance() for b, h, head in heads_of(shape, call, q, k)}
    for (b, h), distance in distances.items():
        for tau, aware in ((distance * 0.999, False), (min(distance * 1.001 + 1e-6, 1.0), True)):
            got = FlexPrefill(tau=tau, **SMALL).query_aware(q, k, call)
            assert bool(got[b, h]) is aware


def test_heads_of_both_kinds_in_one_plan() -> None:
    q, k, v = Shape(1, 2, 2, 200, 200, 8, 0).tensors()
    q[:, :2] *= 0.01  # flat attention is what pooling predicts
    q[:, 2:] *= 6.0
    call = gs.Call(causal=True)
    method = FlexPrefill(mass=0.5, **SMALL)
    assert method.query_aware(q, k, call).tolist() == [[True, True, False, False]]
    got = block_mask(method.plan(q, k, v, call))
    aware = block_mask(FlexPrefill(mass=0.5, tau=1.0, **SMALL).plan(q, k, v, call))
    lines = block_mask(FlexPrefill(mass=0.5, tau=0.0, **SMALL).plan(q, k, v, call))
    assert torch.equal(got, torch.cat([aware[:, :2], lines[:, 2:]], dim=1))


@given(st.integers(0, 999), st.integers(1, 20))
def test_divergence_has_no_nan(seed: int, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, size, generator=g) * (torch.rand(2, size, generator=g) < 0.6)
    p[0], q[-1] = 1.0, 1.0
    p, q = p / p.sum(), q / q.sum()
    want = 0.0
    for a, b in zip(p.double().tolist(), q.double().tolist(), strict=True):
        want += sum(x * math.log(2 * x / (a + b)) / 2 for x in (a, b) if x > 0)
    assert float(divergence(p, q)) == pytest.approx(want, abs=1e-12)
    assert float(divergence(p, p)) == pytest.approx(0.0, abs=1e-12)


def test_probabilities_of_exactly_zero_do_not_flip_a_head() -> None:
    """In the public code one zero makes the divergence NaN, and the head vertical-slash."""
    q = torch.ones(1, 1, 512, 16)
    k = torch.full((1, 1, 512, 16), -40.0)
    k[:, :, 128:256] = 40.0  # constant inside blocks: pooling is exact
    logits = (q[:, :, -1:] @ k.mT / 4).softmax(-1)
    assert (logits == 0).any()
    assert FlexPrefill().query_aware(q, k).all()
    assert FlexPrefill().query_aware(q, k, gs.Call(causal=True)).all()


def test_scattered_columns_count_as_columns() -> None:
    """64 hot columns in 64 blocks: divided by 128 they were one block of coverage."""
    num = 64 * 128
    k = torch.zeros(1, 1, num, 8)
    k[:, :, 77::128, 0] = 40.0
    q = torch.zeros(1, 1, num, 8)
    q[..., 0] = 40.0
    plan = FlexPrefill(tau=0.0, min_budget=1).plan(q, k, k, gs.Call(causal=True))
    last = block_mask(plan)[0, 0, -1]
    assert last.sum() >= 0.9 * 64


def test_the_crossing_entry_is_included_in_both_patterns() -> None:
    """Shares .5, .3, .2 of three blocks: covering .6 takes two of them."""
    k = torch.zeros(1, 1, 32, 2)
    k[0, 0, :, 0] = torch.tensor([0.2, 0.5, 1e-30, 0.3]).log().repeat_interleave(8)
    q = torch.zeros(1, 1, 32, 2)
    q[..., 0] = 1.0
    sizes = {"tile": 32, "block": 8, "min_budget": 1}
    call = gs.Call(scale=1.0)
    kept = block_mask(FlexPrefill(mass=0.6, tau=1.0, **sizes).plan(q[:, :, :8], k, k, call))
    assert kept.flatten().tolist() == [True, True, False, True]  # the first, .5 and .3
    kept = block_mask(FlexPrefill(mass=0.45, tau=1.0, **sizes).plan(q[:, :, :1], k, k, call))
    assert kept.flatten().tolist() == [True, True, False, True]  # the first, .5 and the diagonal


def test_a_floor_of_keys_the_sink_and_the_diagonal() -> None:
    q, k, v = Shape(1, 2, 1, 300, 300, 8, 0).tensors()
    for tau in (0.0, 1.0):
        method = FlexPrefill(mass=1e-9, tau=tau, tile=16, block=16, min_budget=64)
        kept = block_mask(method.plan(q, k, v, gs.Call(causal=True)))
        assert kept[..., 0].all()
        assert kept.diagonal(dim1=2, dim2=3).all()
        sees = torch.arange(1, 20)
        assert (kept.sum(-1) >= sees.clamp(max=4)).all()
        assert (kept.sum(-1) <= 7).all()


def test_selection_uses_the_calls_scale() -> None:
    q, k, v = Shape(1, 2, 2, 200, 200, 16, 2).tensors()
    method = FlexPrefill(mass=0.6, **SMALL)
    plain = block_mask(method.plan(q, k, v, gs.Call(causal=True)))
    scaled = gs.Call(causal=True, scale=1.0)
    assert torch.equal(plain, block_mask(method.plan(q / 4, k, v, scaled)))
    assert not torch.equal(plain, block_mask(method.plan(q, k, v, scaled)))
    tau = FlexPrefill(tau=0.25, **SMALL)
    assert torch.equal(tau.query_aware(q, k), tau.query_aware(q / 4, k, gs.Call(scale=1.0)))


FULL = [
    FlexPrefill(density=1.0),
    FlexPrefill(density=1.0, tau=0.0, tile=16, block=8),
    FlexPrefill(mass=1.0, tau=0.0, **SMALL),
    FlexPrefill(mass=1.0, tau=1.0, **SMALL),
    FlexPrefill(min_budget=999, block=8, tile=16),
]


@pytest.mark.parametrize("method", FULL, ids=str)
def test_full_budgets_are_dense(method: FlexPrefill) -> None:
    for shape, call in CASES:
        check_causal(method, shape.tensors(), call)
        if call.key_valid is None and shape.num_queries <= shape.num_keys:
            check_full(method, shape.tensors(), call)


def test_mass_that_rounds_to_zero_is_covered_at_one() -> None:
    q = torch.ones(1, 1, 512, 16)
    k = torch.where(torch.arange(512)[:, None] < 128, 30.0, -30.0).expand(1, 1, 512, 16)
    for tau in (0.0, 1.0):
        assert FlexPrefill(mass=1.0, tau=tau, min_budget=1).plan(q, k, k).density == 1.0


@pytest.mark.parametrize("tau", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("lengths", [(2048, 2048), (4097, 4097), (1500, 2048), (1500, 4097)])
def test_the_asked_density_is_met_and_grows(lengths: tuple[int, int], tau: float) -> None:
    q, k, v = Shape(1, 2, 1, *lengths, 8, 1).tensors()
    for causal in (False, True):
        last = torch.zeros(1, dtype=torch.bool)
        for density in (0.15, 0.4, 0.8):
            method = gs.get_method("flexprefill", density=density, tau=tau)
            plan = method.plan(q, k, v, gs.Call(causal=causal))
            assert abs(plan.density - density) <= 0.02  # of visible pairs, the causal half
            mask = block_mask(plan)
            assert not (last & ~mask).any()
            last = mask


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_more_mass_keeps_more(tau: float) -> None:
    q, k, v = Shape(2, 1, 2, 200, 200, 16, 2).tensors()
    last = torch.zeros(1, dtype=torch.bool)
    for mass in (0.1, 0.4, 0.7, 0.95, 1.0):
        mask = block_mask(
            FlexPrefill(mass=mass, tau=tau, **SMALL).plan(q, k, v, gs.Call(causal=True))
        )
        assert not (last & ~mask).any()
        last = mask


@pytest.mark.parametrize("tau", [0.0, 1.0])
@pytest.mark.parametrize("density", [None, 0.4])
def test_padding_and_neighbours_change_nothing(tau: float, density: float | None) -> None:
    own = {} if density is not None else {"mass": 0.5, "min_budget": 9}
    method = FlexPrefill(tau=tau, density=density, tile=16, block=8, **own)
    for causal in (False, True):
        q, k, v = Shape(2, 2, 2, 237, 237, 16, 2).tensors()
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
        ({"tau": -0.1}, "tau=-0.1"),
        ({"min_budget": 0}, "min_budget=0"),
        ({"density": 2.0}, "density=2.0"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        FlexPrefill(**params)
