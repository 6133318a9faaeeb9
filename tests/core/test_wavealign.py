"""WaveAlign: the same work in an order that finds neighbours again, and says why it does not."""

import tomllib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.order import OrderDecision, WaveAlign, get_order, list_orders
from gossamer.order import wavealign as module
from gossamer.plan.rows import tile_queries, tile_rows

BLOCK = 128
WAVE = 16


def block_plan(mask: torch.Tensor, *, tile: int = BLOCK, block: int = BLOCK) -> gs.SparsePlan:
    """A plan of consecutive tiles from a mask [B, H, T, C]."""
    return gs.SparsePlan(
        num_queries=mask.shape[2] * tile,
        num_keys=mask.shape[3] * block,
        tile=tile,
        keys=gs.KeyBlocks.from_mask(mask, block=block),
    )


def token_plan(mask: torch.Tensor) -> gs.SparsePlan:
    """The same work as `block_plan(mask)`, as lists of single keys."""
    keys = mask.repeat_interleave(BLOCK, dim=-1)
    index = torch.argsort((~keys).byte(), dim=-1, stable=True)
    lists = gs.KeyTokens.from_lists(index[..., : int(keys.sum(-1).max())], count=keys.sum(-1))
    return replace(block_plan(mask), keys=lists)


def banded(size: int, width: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A band of uneven rows [1, 1, size, size], shuffled, and the order that sorts it."""
    g = torch.Generator().manual_seed(seed)
    reach = torch.randint(width // 3, width, (size, 1), generator=g)
    distance = (torch.arange(size) - torch.arange(size)[:, None]).abs()
    shuffle = torch.randperm(size, generator=g)
    return (distance <= reach)[shuffle][None, None], shuffle.argsort()


def working_set(mask: torch.Tensor, order: torch.Tensor, wave: int = WAVE) -> float:
    """The locality statistic: new blocks per wave of an empty cache, on average; mask [T, C]."""
    return sum(mask[part.long()].any(0).sum().item() for part in order.split(wave)) / -(
        -len(order) // wave
    )


def launched(plan: gs.SparsePlan, **params: int) -> torch.Tensor:
    """The launch order [B, H, T] of a plan."""
    order = WaveAlign(skip="never", **{"wave": WAVE, **params}).order(plan).launch_order
    assert order is not None
    return order


@pytest.mark.parametrize("make", [block_plan, token_plan])
@pytest.mark.parametrize("rank", [2, 4])
def test_a_shuffled_band_becomes_a_band_again(make: type, rank: int) -> None:
    mask, in_order = banded(192, 24)
    order = launched(make(mask), rank=rank)[0, 0]
    rows = mask[0, 0]
    shuffled = working_set(rows, torch.arange(len(rows)))
    ideal = working_set(rows, in_order)
    assert shuffled > 2 * ideal  # there is something to gain
    assert working_set(rows, order) < ideal + 0.25 * (shuffled - ideal)


def test_blocks_of_rows_that_read_the_same_stand_together() -> None:
    """Three kinds of rows, mixed: every wave but those at a border holds one kind."""
    g = torch.Generator().manual_seed(1)
    kind = torch.randint(3, (160,), generator=g)
    mask = (torch.rand(3, 64, generator=g) < 0.3)[kind][None, None]
    order = launched(block_plan(mask))[0, 0].long()
    mixed = sum(len(kind[part].unique()) > 1 for part in order.split(WAVE))
    assert mixed <= 2


def test_the_embedding_spans_the_leading_left_singular_vectors() -> None:
    """Against LAPACK on the dense centred mask: the same plane."""
    mask, _ = banded(96, 20)
    mask[0, 0, 5] = False  # an empty tile takes no part
    plan = block_plan(mask)
    active = mask.any(-1)[0]
    at = (torch.zeros(1, dtype=torch.long),) * 2
    lists = module._block_lists(plan, at, tile_rows(plan)[:, 0], active, int(mask.sum(-1).max()))
    got = lists.embed(2, 60)[0].double()
    rows = mask[0, 0].double()[active[0]]
    plane = torch.linalg.svd(rows - rows.mean(0)).U[:, :2]
    assert (got[~active[0]] == 0).all()
    angle = torch.linalg.svdvals(plane.T @ got[active[0]])
    assert angle.tolist() == pytest.approx([1, 1], abs=1e-4)


def test_the_circle_of_angles_is_cut_at_its_widest_gap() -> None:
    turn = torch.tensor([170.0, -170.0, 100.0, 175.0, -100.0, 0.0]).deg2rad()
    points = torch.stack([turn.cos(), turn.sin()], dim=-1)[None]
    active = torch.tensor([[True] * 5 + [False]])
    assert module._by_angle(points, active).tolist() == [[2, 0, 3, 1, 4, 5]]


@settings(max_examples=20)
@given(shapes(max_tokens=90), options(), st.integers(1, 9), st.integers(1, 4))
def test_law_4_the_work_and_the_output_stay_the_same(
    shape: Shape, opt: Options, wave: int, iters: int
) -> None:
    """Every tile is launched once per head; outputs are equal bit for bit."""
    plan = random_plan(shape, opt)
    order = WaveAlign(wave=wave, iters=iters, skip="never").order(plan)
    assert order.launch_order is not None
    assert order.launch_order.dtype == torch.int32
    tiles = torch.arange(plan.num_tiles).expand_as(order.launch_order)
    assert torch.equal(order.launch_order.sort(-1).values.long(), tiles)
    assert replace(order, launch_order=None).keys is plan.keys
    assert torch.equal(order.weights(), plan.weights())
    tensors = shape.tensors()
    got, want = gs.attend(*tensors, order), gs.attend(*tensors, plan)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@settings(max_examples=60)
@given(shapes(), options(), st.integers(1, 9))
def test_waves_run_long_rows_first_and_empty_tiles_last(
    shape: Shape, opt: Options, wave: int
) -> None:
    plan = random_plan(shape, opt)
    launch = launched(plan, wave=wave).long()
    count = plan.keys.count.expand(*launch.shape[:2], -1).long()
    count = count.gather(2, tile_rows(plan).expand_as(launch))
    has_query = (tile_queries(plan) >= 0).any(-1).expand_as(count)
    for tiles, length, used in zip(
        launch.flatten(0, 1),
        count.flatten(0, 1),
        (has_query & (count > 0)).flatten(0, 1),
        strict=True,
    ):
        number = int(used.sum())
        assert used[tiles[:number]].all()
        assert torch.equal(tiles[number:], tiles[number:].sort().values)
        if number < 3:
            assert torch.equal(tiles[:number], tiles[:number].sort().values)
            continue
        for part in tiles[:number].split(wave):
            assert torch.equal(length[part], length[part].sort(descending=True).values)


@pytest.mark.parametrize("tiles", [1, 2, 40])
def test_tiles_that_all_read_the_same_keep_their_order(tiles: int) -> None:
    """The centred mask is exactly 0, whatever its density; so is that of too few rows."""
    row = torch.rand(1, 2, 1, 30, generator=torch.Generator().manual_seed(0)) < 0.4
    mask = row.expand(-1, -1, tiles, -1)
    for make in (block_plan, token_plan):
        assert torch.equal(launched(make(mask)), torch.arange(tiles).expand(1, 2, -1).int())
    other = torch.rand(1, 1, 2, 30, generator=torch.Generator().manual_seed(1)) < 0.5
    assert launched(block_plan(other)).tolist() == [[[0, 1]]]


def test_a_plan_without_tiles_stays_as_it_is() -> None:
    plan = gs.SparsePlan(
        num_queries=0,
        num_keys=BLOCK,
        tile=BLOCK,
        keys=gs.KeyBlocks.from_mask(torch.ones(1, 1, 0, 1, dtype=torch.bool), block=BLOCK),
    )
    assert WaveAlign(skip="never").order(plan) is plan
    assert not WaveAlign().decide(plan).order


def test_heads_and_chunks_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [banded(96, 12, seed=seed)[0] for seed in range(6)]
    mask = torch.cat(masks).view(2, 3, 96, 96)
    whole = launched(block_plan(mask))
    for i, one in enumerate(masks):
        assert torch.equal(launched(block_plan(one))[0, 0], whole.flatten(0, 1)[i])
    tokens = launched(token_plan(mask))
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    assert torch.equal(launched(block_plan(mask)), whole)
    assert torch.equal(launched(token_plan(mask)), tokens)


def test_tiles_that_share_a_row_stand_together() -> None:
    """Rows are per group: tiles of one group read the same, and are launched side by side."""
    mask, _ = banded(60, 8)
    row = torch.arange(180).view(1, 1, -1) % 60
    plan = replace(block_plan(mask.repeat(1, 1, 3, 1)), keys=block_plan(mask).keys)
    plan = replace(plan, tile_row=row.int())
    kinds, kind = mask[0, 0].unique(dim=0, return_inverse=True)
    kind = kind[row[0, 0]][launched(plan, wave=1)[0, 0].long()]
    assert (kind[1:] != kind[:-1]).sum() == len(kinds) - 1


def test_single_keys_are_counted_in_blocks_of_128() -> None:
    """Virtual keys, which stand behind the real ones, count in blocks of their own."""
    index = torch.tensor([[[[0, 1, 127, 128, 600, 640], [255, 256, 511, 512, 512, 512]]]])
    keys = gs.KeyTokens.from_lists(index, count=torch.tensor([[[6, 4]]]))
    extra = torch.zeros(1, 1, 41, 8)
    keys = replace(keys, extra_k=extra, extra_v=extra)
    plan = gs.SparsePlan(num_queries=256, num_keys=600, tile=128, keys=keys)
    column, value = module._count_in_blocks(keys, keys.start[0], keys.count[0], 6)
    dense = torch.zeros(1, 2, module._num_columns(plan), dtype=torch.int64)
    dense.scatter_add_(2, column, value)
    assert dense.tolist() == [[[3, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0]]]


def test_the_same_plan_gives_the_same_order_and_no_global_numbers() -> None:
    plan = block_plan(banded(64, 12)[0])
    before = torch.random.get_rng_state()
    first = launched(plan)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(launched(plan), first)


def long_plan(num_keys: int, density: float, tiles: int = 400) -> gs.SparsePlan:
    """A plan of many keys: what `decide` reads costs nothing, whatever the length."""
    blocks = num_keys // BLOCK
    g = torch.Generator().manual_seed(0)
    count = (blocks * density * (0.5 + torch.rand(1, 1, tiles, generator=g))).int().clamp(1, blocks)
    index = torch.arange(blocks, dtype=torch.int32).expand(1, 1, tiles, -1)
    keys = gs.KeyBlocks(block=BLOCK, count=count, index=index)
    return gs.SparsePlan(num_queries=tiles * BLOCK, num_keys=num_keys, tile=BLOCK, keys=keys)


@pytest.mark.parametrize(
    ("tokens", "density", "tiles", "pays", "reason"),
    [
        (24_576, 0.15, 400, False, "K and V of a head stay in the L2 cache"),
        (98_304, 0.15, 400, False, "98304 keys: up to 98304"),
        (147_968, 0.15, 400, True, "estimated gain 1.05"),
        (364_032, 0.15, 400, True, "estimated gain 1.08"),
        (364_032, 0.017, 400, False, "density 0.017: up to 0.067, attention is too short"),
        (364_032, 0.15, 132, False, "132 tiles: all run in one wave of 132"),
        (364_032, 1.0, 400, False, "not above the 1.032x it costs"),
    ],
)
def test_plans_are_left_alone_where_ordering_does_not_pay(
    tokens: int, density: float, tiles: int, pays: bool, reason: str
) -> None:
    """The paper's figure 13, and the gains that were measured on an H200."""
    plan = long_plan(tokens, density, tiles)
    if density == 1.0:
        full = torch.full_like(plan.keys.count, tokens // BLOCK)
        plan = replace(plan, keys=replace(plan.keys, count=full))
    decision = WaveAlign().decide(plan)
    assert decision.order is pays
    assert reason in decision.reason
    assert WaveAlign().explain(plan) == (pays, decision.reason)
    assert (WaveAlign().order(plan).launch_order is not None) is pays


def test_the_estimate_grows_with_length() -> None:
    order = WaveAlign()
    gains = [
        order.decide(long_plan(n, 0.15)).estimated_gain for n in (65_536, 131_072, 262_144, 524_288)
    ]
    assert gains[0] == 1.0
    assert gains == sorted(gains)


def test_density_is_that_of_visible_pairs() -> None:
    """A causal plan of every visible block is dense, not half."""
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    causal = replace(block_plan(mask), causal=True)
    assert module._density(causal) == 1.0
    assert module._density(block_plan(mask)) == pytest.approx(0.5, abs=0.01)


def test_a_decision_that_is_handed_over_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = block_plan(banded(64, 12)[0])
    yes = OrderDecision(order=True, reason="asked for", estimated_gain=1.0)
    monkeypatch.setattr(module, "_density", lambda plan: pytest.fail("decided twice"))
    assert WaveAlign().order(plan, yes).launch_order is not None
    assert WaveAlign().order(plan, replace(yes, order=False)) is plan


def test_orders_are_found_by_name_and_rebuilt_from_toml() -> None:
    assert list_orders() == ["wavealign"]
    order = get_order("wavealign", wave=64, iters=5)
    assert order == WaveAlign(wave=64, iters=5)
    text = "\n".join(f"{key} = {value!r}" for key, value in order.params().items())
    assert get_order(order.name, **tomllib.loads(text)) == order
    doc = WaveAlign.__doc__ or ""
    assert all(f"{param}:" in doc for param in order.params())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"wave": 0}, 'wave=0 must be an integer >= 1 or "auto"'),
        ({"wave": "all"}, "wave='all' must be"),
        ({"rank": 1}, "rank=1 must be an integer >= 2"),
        ({"iters": 0}, "iters=0 must be an integer >= 1"),
        ({"skip": "always"}, r"skip='always' must be one of \('auto', 'never'\)"),
        ({"waves": 3}, "no parameter 'waves': did you mean 'wave'"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, int | str], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        get_order("wavealign", **params)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(gs.PlanError, match="did you mean 'wavealign'"):
        get_order("wave-align")
