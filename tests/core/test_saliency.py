"""Block saliency, threshold maps and masks against plain loops over their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.select import saliency as saliency_module
from gossamer.select.saliency import block_saliency, entry_levels, threshold_map, threshold_mask


def probabilities(q, k, scale, seen):
    """Textbook softmax of one head in float64; `seen` [N, S], rows that see nothing are 0."""
    logits = (q.double() @ k.double().T * scale).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def by_loops(q, k, *, scale, tile, block, valid=None, causal=False, num_keys=None):
    """Equation 1, token by token."""
    batch, heads, num_queries, _ = q.shape
    total = k.shape[2]
    num_keys = total if num_keys is None else num_keys
    shape = (batch, heads, -(-num_queries // tile), -(-num_keys // block))
    out = torch.zeros(shape, dtype=torch.float64)
    for b in range(batch):
        row = torch.ones(total, dtype=torch.bool)
        if valid is not None:
            row = valid[b if valid.shape[0] > 1 else 0]
        seen = row.expand(num_queries, -1)
        if causal:
            position = torch.arange(num_queries)[:, None] + num_keys - num_queries
            seen = seen & (torch.arange(total) <= position)
        clean = k[b].masked_fill(~row[:, None], 0.0)
        for h in range(heads):
            real = row[:num_queries] if valid is not None and num_queries == num_keys else None
            queries = q[b, h] if real is None else q[b, h].masked_fill(~real[:, None], 0.0)
            p = probabilities(queries, clean[h // (heads // k.shape[1])], scale, seen)
            for i in range(num_queries):
                if real is None or real[i]:
                    for v in range(shape[3]):
                        end = min((v + 1) * block, num_keys)
                        out[b, h, i // tile, v] += p[i, v * block : end].sum()
    return out / (tile * block)


CASES = {
    "plain": {},
    "ragged": {"tile": 7, "block": 9},
    "tile and block differ": {"tile": 32, "block": 5},
    "causal": {"causal": True},
    "fewer queries": {"num_queries": 20, "causal": True},
    "more queries than keys": {"num_queries": 70, "causal": True},
    "text behind": {"num_keys": 37},
    "padded": {"padded": True},
    "padded, shared": {"padded": True, "shared": True},
    "padded text": {"padded": True, "num_keys": 50, "num_queries": 50},
    "padded and causal": {"padded": True, "causal": True},
}


@pytest.mark.parametrize("chunk", [1 << 25, 16 * 61 * 2, 50], ids=["whole", "tiles", "part tiles"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_saliency_is_the_mean_probability(case, chunk, monkeypatch):
    case = {"tile": 16, "block": 16} | case
    monkeypatch.setattr(saliency_module, "_CHUNK_BYTES", 4 * chunk)
    num_queries = case.pop("num_queries", 61)
    padded, shared = case.pop("padded", False), case.pop("shared", False)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, num_queries, 8, generator=g)
    k = torch.randn(2, 2, 61, 8, generator=g)
    valid = None
    if padded:
        valid = torch.arange(61) < torch.tensor([[61 if not shared else 40], [23]])
        valid = valid[:1] if shared else valid
        hole = ~valid.expand(2, -1)
        k = k.masked_fill(hole[:, None, :, None], torch.nan)
        if num_queries == case.get("num_keys", 61):
            q = q.masked_fill(hole[:, None, :num_queries, None], torch.nan)
    want = by_loops(q, k, scale=0.4, valid=valid, **case)
    got = block_saliency(q, k, scale=0.4, valid=valid, **case)
    # float32 against float64: one rounding for each of the probabilities in a block's sum.
    assert got.dtype == torch.float32
    assert (got.double() - want).abs().max() <= 61 * torch.finfo(torch.float32).eps * want.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_whatever_the_input(dtype):
    q, k = torch.randn(2, 1, 1, 40, 8).to(dtype).unbind()
    want = by_loops(q, k, scale=0.3, tile=16, block=16)
    got = block_saliency(q, k, scale=0.3, tile=16, block=16)
    assert (got.double() - want).abs().max() <= 40 * torch.finfo(torch.float32).eps * want.max()


def test_rows_of_a_whole_map_sum_to_one():
    q, k = torch.randn(2, 1, 2, 96, 8).unbind()
    mass = block_saliency(q, k, scale=1.0, tile=32, block=32) * 32 * 32
    torch.testing.assert_close(mass.sum(-1), torch.full((1, 2, 3), 32.0))


@given(st.integers(0, 99), st.integers(1, 9), st.booleans())
def test_a_threshold_is_the_least_share_at_which_a_block_is_among_the_best(seed, width, causal):
    """Equation 2 for one prompt: T = min{p : block in Top-k(S, p)}, k = p * n."""
    g = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 4, (4, width), generator=g).float()  # ties
    possible = torch.ones(4, width, dtype=torch.bool)
    if causal:
        possible = torch.arange(width) <= torch.arange(4)[:, None]
    got = threshold_map(score, possible)
    for row in range(4):
        able = [c for c in range(width) if possible[row, c]]
        ranked = sorted(able, key=lambda c: (-float(score[row, c]), c))
        for column in range(width):
            if column not in able:
                assert got[row, column] == torch.inf
                continue
            shares = [count / len(able) for count in range(1, len(able) + 1)]
            first = next(p for p in shares if column in ranked[: round(p * len(able))])
            assert got[row, column] == pytest.approx(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n", [1, 3, 33, 591])
def test_a_mask_keeps_exactly_the_best_share(n, dtype):
    g = torch.Generator().manual_seed(n)
    score = torch.rand(2, n, generator=g)
    thresholds = threshold_map(score).to(dtype)
    for count in {1, 2, n // 3, n // 2, n - 1, n} & set(range(1, n + 1)):
        mask = threshold_mask(thresholds, count / n)
        assert mask.sum(-1).tolist() == [count, count]
        assert torch.equal(
            mask, score >= score.sort(-1, descending=True).values[:, count - 1 :][:, :1]
        )


def test_no_row_is_empty_at_any_threshold():
    thresholds = threshold_map(torch.rand(3, 5, 7))
    for p in (1e-9, 0.1, 1 / 7):
        assert (threshold_mask(thresholds, p).sum(-1) == 1).all()
    assert threshold_mask(thresholds, 1.0).all()


def test_thresholds_per_head():
    thresholds = threshold_map(torch.rand(2, 4, 8))
    mask = threshold_mask(thresholds, torch.tensor([0.25, 0.5])[:, None, None])
    assert mask.sum(-1).tolist() == [[2] * 4, [4] * 4]


def test_blocks_that_are_not_possible_never_enter():
    possible = torch.ones(5, 5).tril().bool()
    mask = threshold_mask(threshold_map(torch.rand(5, 5), possible), 1.0)
    assert torch.equal(mask, possible)


def test_the_minimum_over_prompts_is_the_union_of_their_masks():
    maps = threshold_map(torch.rand(3, 6, 10)).half()
    for p in (0.1, 0.25, 0.3, 0.7, 1.0):
        union = threshold_mask(maps, p).any(0)
        assert torch.equal(threshold_mask(maps.amin(0), p), union)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_entry_levels_are_where_the_mask_first_holds(dtype):
    thresholds = threshold_map(torch.rand(3, 6, 10)).to(dtype).amin(0)
    for number in (1, 4, 10, 64):
        levels = torch.arange(1, number + 1).double() / number
        masks = torch.stack([threshold_mask(thresholds, float(p)) for p in levels])
        assert torch.equal(entry_levels(thresholds, levels), masks.long().argmax(0))
