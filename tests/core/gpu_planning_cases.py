"""Cases that `test_mass_gpu.py` runs through Triton's interpreter, against the torch versions."""

import pytest
import torch

from cases import Shape
from gossamer.group import pddp as pddp_module
from gossamer.group.gpu import available, ranks
from gossamer.group.gpu import pddp as pddp_kernels
from gossamer.group.pddp import pddp
from gossamer.methods.mc_sparse import MCSparse
from gossamer.select import exact
from gossamer.select.exact import Tiles, exact_mass, top_keys
from gossamer.select.saliency import block_saliency

MASKS = {
    "plain": {},
    "permuted": {"permuted": True, "tile": 48},
    "causal": {"causal": True, "tile": 16},
    "fewer queries": {"causal": True, "num_queries": 70},
    "more queries than keys": {"causal": True, "num_queries": 250},
    "padded": {"padded": True, "permuted": True},
    "padded and causal": {"padded": True, "causal": True},
    "padded keys alone": {"padded": True, "num_queries": 100},
    "narrow": {"dim": 20, "tile": 8},
}


def by_torch(patch: pytest.MonkeyPatch) -> None:
    """Make the torch versions run from here on."""
    for module in (exact, pddp_module):
        patch.setattr(module, "runs_triton", lambda _: False)


def problem(case: dict) -> tuple[tuple[torch.Tensor, ...], Tiles]:
    case = {"num_queries": 161, "tile": 32, "dim": 32, "causal": False} | case
    tile, dim, num_queries, num_keys = case["tile"], case["dim"], case["num_queries"], 161
    shape = Shape(2, 1, 2, num_queries, num_keys, dim, 1)
    q, k, v = shape.tensors(torch.float32)
    valid = index = None
    if case.get("padded"):
        valid = torch.arange(num_keys) % 7 != torch.tensor([[3], [0]])
        hidden = ~valid[:, None, :, None]
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        if num_queries == num_keys:
            q = q.masked_fill(hidden, torch.nan)
    if case.get("permuted"):
        places = (-(-num_queries // tile) + 1) * tile
        order = torch.rand(2, 2, places, generator=shape.generator()).argsort(-1)
        index = torch.where(order < num_queries, order, -1).view(2, 2, -1, tile).int()
    tiles = Tiles(
        num_queries=num_queries,
        num_keys=num_keys,
        tile=tile,
        query_index=index,
        causal=case["causal"],
        key_valid=valid,
        scale=dim**-0.5,
    )
    return (q, k, v), tiles


@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS.keys())
def test_mass_and_attention_are_those_of_float64(
    case: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, tiles = problem(case)
    assert available.runs_triton(tensors[0])
    got = exact_mass(*tensors, tiles)
    alone = exact_mass(*tensors[:2], None, tiles)
    by_torch(monkeypatch)
    want = exact_mass(*(x.double() for x in tensors), tiles)
    # Each probability has the rounding of a product of `dim` terms and of an exponential.
    for found in (got, alone):
        assert torch.equal(found.mass == -torch.inf, want.mass == -torch.inf)
        assert torch.equal(found.lse == -torch.inf, want.lse == -torch.inf)
        torch.testing.assert_close(found.mass.double(), want.mass, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(found.lse.double(), want.lse, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.out.double(), want.out, rtol=1e-5, atol=2e-6)
    assert got.out.dtype == torch.float32


def test_mass_of_long_rows_in_parts_and_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than one program takes, and parts that hold one tile each."""
    q, k, _ = Shape(1, 1, 1, 140, 8300, 16, 1).tensors(torch.float16)
    tiles = Tiles(num_queries=140, num_keys=8300, tile=64, scale=0.25)
    monkeypatch.setattr(exact, "_GPU_BYTES", 4 * 8300)
    assert len(list(exact.stream_mass(q, k, None, tiles))) == 3
    got = exact_mass(q, k, None, tiles)
    by_torch(monkeypatch)
    want = exact_mass(q.double(), k.double(), None, tiles)
    torch.testing.assert_close(got.mass.double(), want.mass, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", ["plain", "causal", "padded", "text behind"])
def test_saliency_sums_the_masses_of_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = Shape(2, 1, 2, 130, 130, 16, 1).tensors()
    options = {"scale": 0.4, "tile": 32, "block": 24}
    options |= {"causal": True} if case == "causal" else {}
    options |= {"num_keys": 100} if case == "text behind" else {}
    if case == "padded":
        options["valid"] = torch.arange(130) < torch.tensor([[130], [77]])
    got = block_saliency(q, k, **options)
    by_torch(monkeypatch)
    want = block_saliency(q, k, **options)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-8)


def test_mass_and_top_keys_make_the_plan_of_the_torch_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = Shape(1, 2, 1, 300, 300, 16, 4).tensors()
    method = MCSparse(density=0.2, grouping="none", tile=64)
    plan, out = method.anchor(*tensors)
    by_torch(monkeypatch)
    want, full = method.anchor(*tensors)
    # A key next to the threshold may fall on its other side.
    assert (plan.weights() == want.weights()).float().mean() > 0.999
    torch.testing.assert_close(out, full, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("length", [1, 300, ranks.CAPACITY, 12_345])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "hidden", "sorted", "two values"])
def test_top_keys_are_those_of_a_sort(
    length: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    score = {
        "normal": score,
        "ties": (2 * score).round() / 2 * torch.tensor([[1.0], [-1.0], [1e-40]]),
        "equal": score * 0.0,
        "hidden": score.masked_fill(torch.arange(length) % 3 == 2, -torch.inf),
        "sorted": score.sort(-1).values,
        "two values": (score > 1.5).float(),
    }[kind]
    width = max(1, length * 3 // 20)
    able = (score > -torch.inf).sum(-1)
    count = torch.tensor([width, max(1, width // 2), 1]).minimum(able)
    got = top_keys(score, count, width)
    by_torch(monkeypatch)
    assert torch.equal(got, top_keys(score, count, width))


def test_top_keys_survive_a_bracket_that_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All large values where nothing is drawn, and more ties than the registers hold."""
    length, width = 20_000, 3_000
    number = torch.arange(ranks.SAMPLE)
    begin = number * length // ranks.SAMPLE
    size = (number + 1) * length // ranks.SAMPLE - begin
    spread = (number * -1640531527 % (1 << 32)) >> 16
    score = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) + 1.0
    score[:, begin + (spread * size >> 16)] = 0.5
    score[1] = score[1].round()
    count = torch.tensor([width, width - 7])
    got = top_keys(score, count, width)
    by_torch(monkeypatch)
    assert torch.equal(got, top_keys(score, count, width))


def stretched(batch: int, heads: int, num_tokens: int, dim: int) -> torch.Tensor:
    """Tokens whose principal directions are far apart, so that rounding decides little."""
    g = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(batch, heads, num_tokens, dim, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64)).Q
    return ((x * 3.0 ** -torch.arange(dim)) @ turn).float()


def tiles_of(order: torch.Tensor, tile: int) -> list[list[int]]:
    return [sorted(part.tolist()) for row in order.flatten(0, 1) for part in row.split(tile)]


@pytest.mark.parametrize("small", [4096, 64], ids=["one program a group", "several"])
@pytest.mark.parametrize(("num_tokens", "tile"), [(1, 32), (150, 32), (390, 128), (20, 3)])
def test_pddp_tiles_are_those_of_the_torch_version(
    num_tokens: int, tile: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pddp_kernels, "_SMALL", small)
    monkeypatch.setattr(pddp_kernels, "_MOMENT_SPAN", 64)
    monkeypatch.setattr(pddp_kernels, "_PROJECT_SPAN", 96)
    monkeypatch.setattr(pddp_kernels, "_PART_BLOCK", 64)
    x = stretched(1, 2, num_tokens, 6)
    got = pddp(x, tile=tile)
    # Of bins this wide no list holds all values: slower passes find the cut.
    monkeypatch.setattr(pddp_kernels, "_BINS", 16)
    monkeypatch.setattr(pddp_kernels, "_MEMBERS", 16)
    assert torch.equal(pddp(x, tile=tile), got)
    by_torch(monkeypatch)
    assert tiles_of(got, tile) == tiles_of(pddp(x, tile=tile), tile)


def test_pddp_rows_may_have_different_lengths_and_padding_decides_nothing() -> None:
    x = stretched(3, 1, 120, 6)
    lengths = [120, 65, 0]
    valid = torch.stack(
        [torch.randperm(120, generator=torch.Generator().manual_seed(1)) < n for n in lengths]
    )
    padded = x.masked_fill(~valid[:, None, :, None], torch.nan)
    order = pddp(padded, tile=32, valid=valid)
    for b, length in enumerate(lengths):
        mine = valid[b].nonzero()[:, 0]
        if length:
            alone = pddp(x[b : b + 1, :, mine], tile=32)
            assert torch.equal(order[b, 0, :length], mine[alone[0, 0]])
        assert torch.equal(order[b, 0, length:], (~valid[b]).nonzero()[:, 0])


def test_pddp_equal_tokens_keep_their_order_and_nan_harms_no_other_row() -> None:
    x = torch.full((1, 2, 150, 24), 0.1)
    x[:, 1, 3] = torch.nan
    order = pddp(x, tile=32)
    assert torch.equal(order[0, 0], torch.arange(150))
    assert torch.equal(order[0, 1].sort().values, torch.arange(150))


def test_pddp_heads_are_independent_and_strides_do_not_matter() -> None:
    x = stretched(2, 2, 150, 16).half()
    order = pddp(x, tile=64)
    assert torch.equal(pddp(x[1:, 1:], tile=64), order[1:, 1:])
    assert torch.equal(pddp(x.transpose(1, 2).contiguous().transpose(1, 2), tile=64), order)
