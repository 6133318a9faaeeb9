"""MInference against its definition in plain loops, and the parts it shares with FlexPrefill."""

import math

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods import minference
from gossamer.methods.minference import PATTERNS, MInference
from gossamer.select import block_layout, probe
from gossamer.select.probe import line_sums
from gossamer.select.probe import probe as pick
from gossamer.select.spans import block_spans, visible_pairs
from gossamer.select.vertical_slash import line_scores
from gossamer.select.whole_head import top_pairs, top_rows
from gossamer.testing import check_causal, check_full, check_valid, visible

SMALL = {"tile": 16, "block": 8}
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
    (Shape(2, 1, 1, 100, 100, 8, 7), gs.Call(causal=True, key_valid=LEFT)),
    (Shape(1, 1, 1, 3, 3, 8, 8), gs.Call()),
]


@pytest.fixture(autouse=True)
def _few_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Force few lines, so that small cases leave a choice."""
    monkeypatch.setattr(minference, "_FIRST_COLUMNS", 3)
    monkeypatch.setattr(minference, "_LAST_DIAGONALS", 4)


def block_mask(plan: gs.SparsePlan) -> torch.Tensor:
    assert isinstance(plan.keys, gs.KeyBlocks)
    return plan.keys.to_mask(plan.num_keys)


def pairs_seen(shape: Shape, call: gs.Call) -> torch.Tensor:
    """Return which pairs of valid query and visible valid key there are, [B, N, S]."""
    seen = visible(call, shape.num_queries, shape.num_keys)
    seen = torch.tensor(True) if seen is None else seen[:, 0]
    seen = seen.expand(shape.batch, shape.num_queries, shape.num_keys).clone()
    if call.key_valid is not None and shape.num_queries == shape.num_keys:
        seen &= call.key_valid[:, :, None]
    return seen


def softmax_rows(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the exact attention [N, S] of one head; zero where nothing is seen."""
    logits = (q.double() @ k.double().T / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def queries_looked_at(seen: torch.Tensor, valid: list[int], call: gs.Call, count: int) -> list[int]:
    """Return the last valid queries, or evenly spaced ones."""
    if call.causal:
        return valid[-count:]
    if len(valid) <= count:
        return valid
    return [valid[(2 * m + 1) * len(valid) // (2 * count)] for m in range(count)]


def valid_of(shape: Shape, call: gs.Call, b: int) -> list[int]:
    """Return the valid queries of a batch row."""
    if call.key_valid is None or shape.num_queries != shape.num_keys:
        return list(range(shape.num_queries))
    return call.key_valid[b].nonzero().flatten().tolist()


def line_oracle(attention: torch.Tensor, rows: list[int], shift: int):
    """Return column sums and diagonal sums {offset: sum} of the rows looked at."""
    columns = [0.0] * attention.shape[1]
    diagonals = dict.fromkeys(range(1 - attention.shape[0], attention.shape[1]), 0.0)
    for i in rows:
        for j, p in enumerate(attention[i].tolist()):
            columns[j] += p / len(rows)
            diagonals[i + shift - j] += p / len(rows)
    return columns, diagonals


def blocks_of(pairs: torch.Tensor) -> torch.Tensor:
    """Return the tiles and blocks that hold one of the pairs [N, S]."""
    rows, columns = -(-pairs.shape[0] // 16), -(-pairs.shape[1] // 8)
    padded = torch.zeros(rows * 16, columns * 8, dtype=torch.bool)
    padded[: pairs.shape[0], : pairs.shape[1]] = pairs
    return padded.view(rows, 16, columns, 8).any(3).any(1)


def heads_of(shape: Shape, q: torch.Tensor, k: torch.Tensor):
    for b in range(shape.batch):
        for h in range(shape.heads):
            yield b, h, q[b, h], k[b, h // shape.group]


def compare(got: torch.Tensor, want: torch.Tensor, seen: torch.Tensor) -> None:
    """Compare the block masks of the tiles that hold a valid query."""
    rows = blocks_of(seen).any(1)
    assert torch.equal(got[rows], want[rows])


@pytest.mark.parametrize(("shape", "call"), CASES)
@pytest.mark.parametrize(("columns", "diagonals"), [(4, 6), (10, 12)])
def test_vertical_slash_is_the_definition(
    shape: Shape, call: gs.Call, columns: int, diagonals: int
) -> None:
    q, k, v = shape.tensors()
    method = MInference(
        pattern="vertical-slash", columns=columns, diagonals=diagonals, queries=10, **SMALL
    )
    plan = method.plan(4 * q, k, v, call)
    plan.validate()
    shift = shape.num_keys - shape.num_queries
    offset = torch.arange(shape.num_queries)[:, None] + shift - torch.arange(shape.num_keys)
    for b, h, queries, keys in heads_of(shape, 4 * q, k):
        seen = pairs_seen(shape, call)[b]
        valid = valid_of(shape, call, b)
        attention = softmax_rows(queries, keys, seen)
        looked = queries_looked_at(seen, valid, call, 10)
        by_column, by_diagonal = line_oracle(attention, looked, shift)
        sees = seen.any(0).nonzero().flatten().tolist()
        real = sees if call.key_valid is None else call.key_valid[b].nonzero().flatten().tolist()
        best = sorted(set(real) - set(real[:3]), key=lambda j: (-by_column[j], j))
        chosen = real[:3] + best[: max(columns - 3, 0)]
        known = [d for d in by_diagonal if not call.causal or d >= 0]
        near = [d for d in known if abs(d) < 4]
        best = sorted(set(known) - set(near), key=lambda d: (-by_diagonal[d], d))
        lines = near + best[: max(diagonals - len(near), 0)]
        pairs = torch.zeros_like(seen)
        pairs[:, chosen] = True
        pairs |= torch.isin(offset, torch.tensor(lines))
        compare(block_mask(plan)[b, h], blocks_of(pairs & seen), seen)


@pytest.mark.parametrize(("shape", "call"), CASES)
def test_a_shape_is_the_definition(shape: Shape, call: gs.Call) -> None:
    q, k, v = shape.tensors()
    plan = MInference(pattern="a-shape", sink=5, local=11, **SMALL).plan(q, k, v, call)
    plan.validate()
    got = block_mask(plan)
    assert got.shape[1] == 1
    assert got.shape[0] == (1 if call.key_valid is None else shape.batch)
    for b in range(got.shape[0]):
        seen = pairs_seen(shape, call)[b]
        pairs = torch.zeros_like(seen)
        real = range(shape.num_keys)
        if call.key_valid is not None:
            real = call.key_valid[b].nonzero().flatten().tolist()
        pairs[:, list(real)[:5]] = True
        for i in range(shape.num_queries):
            for j in range(shape.num_keys):
                pairs[i, j] |= abs(i + shape.num_keys - shape.num_queries - j) < 11
        want = blocks_of(pairs & seen)
        if shape.num_queries > shape.num_keys:  # every query sees the sink, whatever its place
            assert want.any(1).all()
        compare(got[b, 0], want, seen)


@pytest.mark.parametrize(("shape", "call"), CASES)
def test_block_sparse_is_the_definition(shape: Shape, call: gs.Call) -> None:
    q, k, v = shape.tensors()
    plan = MInference(pattern="block-sparse", blocks=3, **SMALL).plan(q, k, v, call)
    plan.validate()
    shift = shape.num_keys - shape.num_queries
    for b, h, queries, keys in heads_of(shape, q, k):
        seen = pairs_seen(shape, call)[b]
        possible = blocks_of(seen)
        valid = set(valid_of(shape, call, b))
        for t in range(len(possible)):
            rows = [i for i in range(16 * t, min(16 * t + 16, shape.num_queries)) if i in valid]
            if not rows:
                continue
            logits = {}
            for c in possible[t].nonzero().flatten().tolist():
                members = [
                    j
                    for j in range(8 * c, min(8 * c + 8, shape.num_keys))
                    if call.key_valid is None or call.key_valid[b, j]
                ]
                logits[c] = float(queries[rows].mean(0) @ keys[members].mean(0))
            first = []
            if call.causal:  # the block that every query of the tile sees is one of the three
                real = seen[rows[0]].nonzero().flatten().tolist()
                first = [real[-1] // 8] if 16 * t in valid else [real[0] // 8]
                first = first if 16 * t + shift >= 0 else []
            best = sorted(set(logits) - set(first), key=lambda c: -logits[c])
            want = set(first + best[: 3 - len(first)])
            assert set(block_mask(plan)[b, h, t].nonzero().flatten().tolist()) == want


@pytest.mark.parametrize(("shape", "call"), CASES)
def test_pairs_and_line_promises_are_those_of_single_tokens(shape: Shape, call: gs.Call) -> None:
    q, k, _ = shape.tensors()
    lengths = (shape.num_queries, shape.num_keys)
    shift = shape.num_keys - shape.num_queries
    pairs = visible_pairs(call, *lengths, **SMALL, device=q.device)
    spans = block_spans(call, *lengths, **SMALL, device=q.device)
    picked = pick(call, *lengths, 10, where="last", device=q.device)
    lines = line_sums(q, k, call, picked, shape.dim**-0.5)
    scores = line_scores(lines, spans, 8)
    for b, h, queries, keys in heads_of(shape, q, k):
        seen = pairs_seen(shape, call)[b]
        valid = valid_of(shape, call, b)
        attention = softmax_rows(queries, keys, seen)
        columns, diagonals = line_oracle(attention, valid[-10:], shift)
        real = [True] * shape.num_keys if call.key_valid is None else call.key_valid[b].tolist()
        for t in range(scores.shape[2]):
            rows = [i for i in valid if i // 16 == t]
            for c in range(scores.shape[3]):
                members = [j for j in range(8 * c, min(8 * c + 8, shape.num_keys)) if real[j]]
                inside = seen[16 * t : 16 * t + 16, 8 * c : 8 * c + 8]
                assert pairs[b % len(pairs), 0, t, c] == inside.sum()
                column = sum(columns[j] for j in members)
                band = sum(diagonals[i + shift - j] for i in rows for j in members)
                want = max(column, band / max(len(rows), 1))
                assert float(scores[b, h, t, c]) == pytest.approx(want, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("shape", "call"), CASES)
@pytest.mark.parametrize("density", [0.1, 0.4, 1.0])
def test_a_head_or_its_rows_share_one_budget(shape: Shape, call: gs.Call, density: float) -> None:
    lengths = (shape.num_queries, shape.num_keys)
    layout = block_layout(call, *lengths, **SMALL, device=torch.device("cpu"))
    pairs = visible_pairs(call, *lengths, **SMALL, device=torch.device("cpu"))
    rows, columns = pairs.shape[2:]
    scores = torch.randn(shape.batch, shape.heads, rows, columns, generator=shape.generator())
    possible = layout.possible.expand(*scores.shape)
    got = top_pairs(scores, pairs, density, layout)
    each = top_rows(scores, pairs, density, layout)
    for b in range(shape.batch):
        cost = pairs[b % len(pairs), 0]
        budget = density * float(cost.sum())
        floor = 0
        for h in range(shape.heads):
            ranking, first = [], []
            for r in range(rows):
                open_ = possible[b, h, r].nonzero().flatten().tolist()
                best = max(open_, key=lambda c, r=r, h=h, b=b: scores[b, h, r, c], default=None)
                if layout.forced is not None:
                    best = layout.forced[b % len(layout.forced), 0, r].nonzero().flatten()
                    best = int(best) if len(best) else None
                first += [] if best is None else [(r, best)]
                ranking += [(r, c) for c in open_ if c != best]
            ranking.sort(key=lambda rc, h=h, b=b: -scores[b, h, rc[0], rc[1]])
            floor = sum(int(cost[rc]) for rc in first)
            spent, want = floor, set(first)
            for rc in ranking:
                if density == 1 or spent + int(cost[rc]) / 2 < budget:
                    want.add(rc)
                    spent += int(cost[rc])
                else:
                    break
            assert {tuple(rc) for rc in got[b, h].nonzero().tolist()} == want
            # Rows: a prefix of each one's own order, and the head's budget to half a block.
            taken = each[b, h]
            for r in range(rows):
                order = scores[b, h, r].masked_fill(~possible[b, h, r], -math.inf)
                if layout.forced is not None:
                    order = order.masked_fill(layout.forced[b % len(layout.forced), 0, r], math.inf)
                kept, left = order[taken[r]], order[~taken[r]]
                assert not len(kept) or not len(left) or kept.min() > left.max()
            total = int((taken * cost).sum())
            assert density == 1 or floor > budget or abs(total - budget) <= int(cost.max())


def test_what_rows_round_up_is_spread_over_them() -> None:
    """Two and a half blocks a row: every other row keeps three, not the upper half."""
    layout = block_layout(gs.Call(), 256, 64, **SMALL, device=torch.device("cpu"))
    pairs = visible_pairs(gs.Call(), 256, 64, **SMALL, device=torch.device("cpu"))
    kept = top_rows(torch.randn(1, 1, 16, 8), pairs, 2.5 / 8, layout)[0, 0].sum(-1)
    assert sorted(kept.tolist()) == [2] * 8 + [3] * 8
    assert (kept.view(4, 4).sum(-1) - 10).abs().max() <= 1


def test_rows_of_the_probe_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = Shape(2, 2, 2, 100, 100, 8, 2).tensors()
    call = gs.Call(causal=True, key_valid=RIGHT)
    picked = pick(call, 100, 100, 64, where="last", device=q.device)
    assert picked.present.sum(-1).tolist() == [64, 43]
    whole = line_sums(q, k, call, picked, 0.3)
    monkeypatch.setattr(probe, "_CHUNK_BYTES", 4 * 8 * 100 * 3)
    pieces = line_sums(q, k, call, picked, 0.3)
    torch.testing.assert_close(pieces.columns, whole.columns)
    torch.testing.assert_close(pieces.diagonals, whole.diagonals)
    assert whole.columns.sum(-1).sub(1).abs().max() < 1e-5


def three_heads() -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k of 1024 tokens: one head for each pattern, in the order of `PATTERNS`."""
    g = torch.Generator().manual_seed(1)
    num, dim = 1024, 64
    position = torch.arange(num)
    q, k = torch.zeros(1, 3, num, dim), torch.zeros(1, 3, num, dim)
    # Scattered columns that all queries read.
    q[0, 0, :, 0] = 10.0
    k[0, 0, [100, 300, 500], 0] = 10.0
    # Each tile reads one block of its past.
    directions = torch.nn.functional.normalize(torch.randn(32, dim, generator=g), dim=-1)
    of_tile = [int(torch.randint(2 * t + 1, (1,), generator=g)) for t in range(32)]
    for t, c in enumerate(of_tile):
        k[0, 1, 16 * c : 16 * c + 16] += directions[t] * 12
        q[0, 1, 32 * t : 32 * t + 32] += directions[t] * 12
    # Near keys, signed so that no mean shows them; the last queries look at far columns instead.
    wave = torch.exp(torch.linspace(-4, -6, 31))[:, None] * position
    both = torch.cat([wave.cos(), wave.sin()]).T  # a dot product falls with the distance
    sign = 1 - 2 * (position % 2)[:, None]
    q[0, 2, :, :62], k[0, 2, :, :62] = 3 * both * sign, 3 * both * sign
    q[0, 2, -64:] = 0.0
    q[0, 2, -64:, 63] = 40.0
    k[0, 2, 100:600:25, 63] = 40.0
    return q, k


def test_auto_finds_the_pattern_that_covers_most() -> None:
    q, k = three_heads()
    call = gs.Call(causal=True)
    sizes = {"tile": 32, "block": 16}
    counts = {
        "vertical-slash": {"columns": 9, "diagonals": 5},
        "block-sparse": {"blocks": 2},
        "a-shape": {"sink": 8, "local": 70},
    }
    sink = {"sink": 8}
    method = MInference(**sink, **sizes)
    assert method.patterns(q, k, call).tolist() == [[0, 1, 2]]
    for density in (0.15, 0.3):
        auto = MInference(density=density, **sink, **sizes).plan(q, k, k, call)
        for head, name in enumerate(PATTERNS):
            own = sink if name == "a-shape" else {}
            fixed = MInference(density=density, pattern=name, **own, **sizes).plan(q, k, k, call)
            mask = block_mask(fixed)
            assert torch.equal(block_mask(auto)[0, head], mask[0, min(head, mask.shape[1] - 1)])
    every = {name: count for each in counts.values() for name, count in each.items()}
    auto = MInference(**every, **sizes).plan(q, k, k, call)
    for head, name in enumerate(PATTERNS):
        mask = block_mask(MInference(pattern=name, **counts[name], **sizes).plan(q, k, k, call))
        assert torch.equal(block_mask(auto)[0, head], mask[0, min(head, mask.shape[1] - 1)])


def test_forced_lines_come_first_inside_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (minference._FIRST_COLUMNS, minference._LAST_DIAGONALS) == (30, 100)
    q, k = three_heads()
    plan = MInference(density=0.6, pattern="vertical-slash").plan(q, k, k, gs.Call(causal=True))
    mask = block_mask(plan)
    assert mask[..., 0].all()
    for t in range(8):
        assert mask[:, :, t, max(0, 2 * t - 1) : 2 * t + 2].all()


def test_columns_and_diagonals_are_cut_not_dropped() -> None:
    """One column more than the density holds is kept in its upper rows: the density is met."""
    q, k = three_heads()
    for density in (0.1, 0.12, 0.14, 0.3):
        for pattern in PATTERNS:
            for causal in (False, True):
                method = MInference(density=density, pattern=pattern)
                plan = method.plan(q, k, k, gs.Call(causal=causal))
                assert abs(plan.density - density) <= 0.02


def test_selection_uses_the_calls_scale() -> None:
    """Without 1/sqrt(d), as in the public search, another pattern's sums would win."""
    q, k, v = Shape(1, 2, 2, 200, 200, 16, 2).tensors()
    method = MInference(pattern="vertical-slash", columns=8, diagonals=8, **SMALL)
    plain = block_mask(method.plan(q, k, v, gs.Call(causal=True)))
    assert torch.equal(plain, block_mask(method.plan(q, k, v, gs.Call(causal=True, scale=0.25))))
    assert torch.equal(plain, block_mask(method.plan(q / 4, k, v, gs.Call(causal=True, scale=1.0))))
    assert not torch.equal(plain, block_mask(method.plan(q, k, v, gs.Call(causal=True, scale=1.0))))


def test_grouped_heads_are_heads_with_keys_repeated() -> None:
    q, k, v = Shape(1, 2, 3, 150, 150, 16, 2).tensors()
    method = MInference(columns=8, diagonals=8, blocks=4, **SMALL)
    many = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    for call in (gs.Call(), gs.Call(causal=True)):
        assert torch.equal(
            method.plan(q, k, v, call).weights(), method.plan(q, *many, call).weights()
        )


FULL = [
    MInference(density=1.0),
    *(MInference(density=1.0, pattern=name, **SMALL) for name in PATTERNS),
    MInference(pattern="a-shape", local=999, **SMALL),
    MInference(pattern="vertical-slash", diagonals=9999, **SMALL),
    MInference(pattern="block-sparse", blocks=99, **SMALL),
    MInference(**SMALL),
]


@pytest.mark.parametrize("method", FULL, ids=str)
def test_full_budgets_are_dense(method: MInference) -> None:
    for shape, call in CASES:
        check_causal(method, shape.tensors(), call)
        if call.key_valid is None and shape.num_queries <= shape.num_keys:
            check_full(method, shape.tensors(), call)


@pytest.mark.parametrize("pattern", ["auto", *PATTERNS])
@pytest.mark.parametrize("lengths", [(2048, 2048), (4097, 4097), (1500, 2048), (1500, 4097)])
def test_the_asked_density_is_met_and_grows(lengths: tuple[int, int], pattern: str) -> None:
    q, k, v = Shape(1, 2, 1, *lengths, 8, 1).tensors()
    for causal in (False, True):
        last = torch.zeros(1, dtype=torch.bool)
        for density in (0.15, 0.4, 0.8):
            method = gs.get_method("minference", density=density, pattern=pattern)
            plan = method.plan(q, k, v, gs.Call(causal=causal))
            assert abs(plan.density - density) <= 0.02
            mask = block_mask(plan)
            assert not (last & ~mask).any()
            last = mask


@pytest.mark.parametrize("name", ["columns", "diagonals", "blocks", "sink", "local"])
def test_more_of_each_count_keeps_more(name: str) -> None:
    q, k, v = Shape(2, 1, 2, 200, 200, 16, 2).tensors()
    last = torch.zeros(1, dtype=torch.bool)
    few = dict.fromkeys(("columns", "diagonals", "blocks", "sink", "local"), 1)
    for number in (1, 5, 20, 80):
        method = MInference(**{**few, name: number}, **SMALL)
        mask = block_mask(method.plan(q, k, v, gs.Call(causal=True)))
        assert not (last & ~mask).any()
        last = mask


@pytest.mark.parametrize("pattern", ["auto", *PATTERNS])
@pytest.mark.parametrize("density", [None, 0.4])
def test_padding_and_neighbours_change_nothing(pattern: str, density: float | None) -> None:
    sizes = {
        "a-shape": {"sink": 9, "local": 20},
        "vertical-slash": {"columns": 8, "diagonals": 8},
        "block-sparse": {"blocks": 4},
    }
    sizes["auto"] = {name: size for each in sizes.values() for name, size in each.items()}
    own = {} if density is not None else sizes[pattern]
    method = MInference(pattern=pattern, density=density, **own, **SMALL)
    for causal in (False, True):
        q, k, v = Shape(2, 2, 2, 237, 237, 16, 2).tensors()
        alone = method.plan(q, k, v, gs.Call(causal=causal)).weights()
        for pad in (1, 40):
            valid = torch.arange(237 + pad).expand(2, -1) < 237
            q_, k_, v_ = (
                torch.nn.functional.pad(x, (0, 0, 0, pad), value=float("nan")) for x in (q, k, v)
            )
            plan = check_valid(
                method, (q_, k_, v_), gs.Call(key_valid=valid, causal=causal, head_offset=3)
            )
            got = plan.weights()[..., :237, :237]
            assert torch.equal(got, alone.expand_as(got))
        part = method.plan(q[1:, 2:], k[1:, 1:], v[1:, 1:], gs.Call(causal=causal)).weights()
        whole = alone.expand(2, 4, -1, -1)[1:, 2:]
        assert torch.equal(part.expand_as(whole), whole)


def test_a_chunk_of_queries_after_a_prefix_is_part_of_the_whole() -> None:
    """Chunked prefill (MInference #186): positions are absolute, the chunk's end is looked at."""
    q, k, v = Shape(1, 1, 1, 256, 256, 16, 2).tensors()
    method = MInference(pattern="vertical-slash", columns=8, diagonals=8, **SMALL)
    whole = block_mask(method.plan(q, k, v, gs.Call(causal=True)))
    chunk = block_mask(method.plan(q[:, :, 128:], k, v, gs.Call(causal=True)))
    assert torch.equal(chunk, whole[:, :, 8:])


def test_only_the_a_shape_is_static() -> None:
    call = gs.Call(causal=True)
    assert MInference(pattern="a-shape").static_key(call) == MInference(pattern="a-shape")
    assert MInference().static_key(call) is None
    q, k, v = Shape(2, 2, 2, 100, 100, 16, 2).tensors()
    method = MInference(pattern="a-shape", density=0.3, **SMALL)
    plan = method.plan(q, k, v, call)
    assert plan.keys.count.shape[:2] == (1, 1)
    assert torch.equal(plan.weights(), method.plan(-q, v, k, call).weights())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"pattern": "tri-shape"}, "pattern='tri-shape' must be one of auto, vertical-slash"),
        ({"columns": 0}, "columns=0"),
        ({"diagonals": 1.5}, "diagonals=1.5"),
        ({"density": 0.0}, "density=0.0"),
        ({"search_density": 2}, "search_density=2"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        MInference(**params)
