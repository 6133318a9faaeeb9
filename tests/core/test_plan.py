"""What a plan says about itself: weights, density, validity, conversions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.plan.flat import flatten, unflatten


def visible(plan: gs.SparsePlan) -> torch.Tensor:
    """Return [B|1, 1, N, S], what causality and padding allow, by the definition."""
    query = torch.arange(plan.num_queries)[:, None]
    key = torch.arange(plan.num_keys)
    seen = torch.ones(1, 1, plan.num_queries, plan.num_keys, dtype=torch.bool)
    if plan.causal:
        seen = seen & (key <= query + plan.num_keys - plan.num_queries)
    if plan.key_valid is not None:
        seen = seen & plan.key_valid[:, None, None]
    return seen


@given(shapes(max_tokens=150), options())
def test_density_counts_weights(shape: Shape, opt: Options) -> None:
    plan = random_plan(shape, opt)
    read = (plan.weights() > 0).double().sum((-2, -1)).mean(1)
    total = visible(plan).double().sum((-2, -1))[:, 0]
    share = torch.where(total > 0, read / total.clamp(min=1), 1.0).clamp(max=1.0)
    assert plan.density == pytest.approx(float(share.mean()), abs=1e-12)


@given(shapes(max_tokens=120), options())
def test_weights_respect_causality_padding_and_window(shape: Shape, opt: Options) -> None:
    plan = random_plan(shape, opt)
    read = plan.weights()[..., : plan.num_keys] > 0
    assert not (read & ~visible(plan)).any()
    if opt.window is not None:
        left, right, sink = opt.window
        position = torch.arange(plan.num_queries)[:, None] + plan.num_keys - plan.num_queries
        key = torch.arange(plan.num_keys)
        inside = torch.ones_like(key - position, dtype=torch.bool)
        if left >= 0:
            inside &= key >= position - left
        if right >= 0:
            inside &= key <= position + right
        valid = torch.ones(1, plan.num_keys, dtype=torch.bool)
        valid = valid if plan.key_valid is None else plan.key_valid
        first = torch.zeros_like(valid)
        for row, keys in zip(first, valid, strict=True):  # padding is no sink
            row[keys.nonzero()[:sink, 0]] = True
        assert not (read & ~(inside | first[:, None, None])).any()


@given(shapes(max_tokens=120), options())
def test_a_plan_survives_being_flattened(shape: Shape, opt: Options) -> None:
    plan = random_plan(shape, opt)
    again = unflatten(*flatten(plan))
    assert torch.equal(again.weights(), plan.weights())
    assert again.density == plan.density


@given(shapes(max_tokens=200), options())
def test_block_masks_and_bits_round_trip(shape: Shape, opt: Options) -> None:
    keys = random_plan(shape, replace(opt, blocks=True, virtual=0, weighted=False)).keys
    assert isinstance(keys, gs.KeyBlocks)
    mask = keys.to_mask(shape.num_keys)
    bits = keys.to_bits(shape.num_keys)
    assert bits.dtype == torch.int32
    for words in (bits, bits.view(torch.uint32)):
        again = gs.KeyBlocks.from_bits(
            words, block=keys.block, num_keys=shape.num_keys, key_order=keys.key_order
        )
        assert torch.equal(again.to_mask(shape.num_keys), mask)
        assert torch.equal(again.count, keys.count)


def test_bit_i_of_word_w_is_block_32w_plus_i() -> None:
    mask = torch.zeros(1, 1, 1, 70, dtype=torch.bool)
    mask[..., [0, 31, 33, 69]] = True
    words = gs.KeyBlocks.from_mask(mask, block=2).to_bits(140)
    assert words.view(torch.uint32).tolist() == [[[[1 + 2**31, 2, 2**5]]]]


def test_a_dense_causal_plan_has_density_one() -> None:
    """Not 0.53, as kept over all pairs would say (SpargeAttn #83)."""
    q = torch.randn(1, 1, 256, 8)
    assert gs.Dense().plan(q, q, q, gs.Call(causal=True)).density == 1.0


def test_density_is_one_where_nothing_is_visible() -> None:
    q = torch.randn(1, 1, 4, 8)
    nothing = gs.Call(key_valid=torch.zeros(1, 4, dtype=torch.bool))
    plan = gs.Dense().plan(q, q, q, nothing)
    assert plan.density == 1.0
    result = gs.attend(q, q, q, plan)
    assert torch.equal(result.out, torch.zeros_like(q))
    assert torch.equal(result.lse, torch.full((1, 1, 4), -torch.inf))


def tokens(**changes: object) -> gs.SparsePlan:
    """Return a small valid plan with changes."""
    index = torch.tensor([[[[0, 2, 5], [1, 3, 4]]]])
    fields = {"num_queries": 4, "num_keys": 6, "tile": 2, "keys": gs.KeyTokens.from_lists(index)}
    return gs.SparsePlan(**{**fields, **changes})


def listing(rows: list[list[int]], count: list[int] | None = None) -> gs.KeyTokens:
    counts = None if count is None else torch.tensor([[count]])
    return gs.KeyTokens.from_lists(torch.tensor([[rows]]), count=counts)


def test_a_valid_plan_passes() -> None:
    tokens().validate()


@pytest.mark.parametrize(
    ("changes", "law"),
    [
        ({"keys": listing([[0, 2], [3, 1]])}, "ascend and be unique"),
        ({"keys": listing([[0, 0], [1, 3]])}, "ascend and be unique"),
        ({"keys": listing([[0, 2], [1, 6]])}, "a key index outside 0…5"),
        ({"keys": listing([[0, 2], [1, 3]], [2, 0])}, "query 2 .* reads no key though it sees 6"),
        ({"keys": listing([[0, 2], [1, 3]], [2, 3])}, "a row outside the pool"),
        ({"keys": listing([[0, 2]])}, "1 key rows for 2 tiles"),
        (
            {"query_index": torch.tensor([[[[0, 1], [1, 3]]]], dtype=torch.int32)},
            "every query must stand in exactly one tile",
        ),
        (
            {"query_index": torch.tensor([[[[0, 1], [2, -1]]]], dtype=torch.int32)},
            "every query must stand in exactly one tile",
        ),
        (
            {"query_index": torch.tensor([[[[0, 1], [2, 4]]]], dtype=torch.int32)},
            "query_index outside -1…3",
        ),
        ({"tile_row": torch.tensor([[[0, 2]]], dtype=torch.int32)}, "tile_row outside 0…1"),
        ({"launch_order": torch.tensor([[[0, 0]]]).int()}, "launch_order must be a permutation"),
        (
            {
                "keys": gs.KeyBlocks.from_mask(
                    torch.ones(1, 1, 2, 3, dtype=torch.bool),
                    block=2,
                    key_order=torch.tensor([[[0, 1, 2, 3, 4, 4]]]).int(),
                )
            },
            "key_order must name every key once",
        ),
    ],
)
def test_an_invalid_plan_is_refused_with_the_law(changes: dict[str, object], law: str) -> None:
    with pytest.raises(gs.PlanError, match=law):
        tokens(**changes).validate()


def blocks(index: list[int], count: int) -> gs.KeyBlocks:
    """Return rows of blocks of 2 keys, the same for two tiles."""
    return gs.KeyBlocks(
        block=2,
        count=torch.full((1, 1, 2), count, dtype=torch.int32),
        index=torch.tensor(index, dtype=torch.int32).expand(1, 1, 2, -1),
    )


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(
    ("keys", "law"),
    [
        (listing([[0, 2, 1], [1, 2, 3]]), "key indices must ascend and be unique"),
        (listing([[0, 2, 2], [1, 2, 3]]), "key indices must ascend and be unique"),
        (listing([[0, 2, 6], [1, 2, 3]]), "a key index outside 0…5"),
        (listing([[0, 2, 5], [1, 2, 3]], [3, 4]), "a row outside the pool"),
        (blocks([1, 0], 2), "block indices must ascend and be unique"),
        (blocks([1, 1], 2), "block indices must ascend and be unique"),
        (blocks([0, 3], 2), "a block index outside 0…2"),
        (blocks([0, 1], 3), "a count above the index's width"),
    ],
)
def test_attend_refuses_rows_that_break_the_format(
    keys: gs.KeyBlocks | gs.KeyTokens, law: str, kernel: str, requires_grad: bool
) -> None:
    q = torch.randn(1, 1, 4, 16, requires_grad=requires_grad)
    x = torch.randn(1, 1, 6, 16)
    with pytest.raises(gs.PlanError, match=law):
        gs.attend(q, x, x, tokens(keys=keys), kernel=kernel)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("changes", "law"),
    [
        ({"keys": listing([[0, 2]])}, "1 key rows for 2 tiles"),
        ({"tile": 1}, "2 key rows for 4 tiles"),
        ({"tile_row": torch.zeros(1, 1, 3).int()}, "tile_row names 3 of 2 tiles"),
        ({"query_index": torch.zeros(1, 1, 2, 3).int()}, "query_index holds 3 a tile of 2"),
        ({"launch_order": torch.zeros(1, 1, 3).int()}, "permutation of the 2 tiles"),
        ({"key_valid": torch.ones(1, 7, dtype=torch.bool)}, "key_valid is of 7 keys, not 6"),
    ],
)
def test_attend_refuses_tensors_that_do_not_fit_one_another(
    changes: dict[str, object], law: str, device: str
) -> None:
    """On any device: shapes need no look at what a tensor holds."""
    plan = tokens(**changes).to(device)
    q, x = torch.randn(1, 1, 4, 16, device=device), torch.randn(1, 1, 6, 16, device=device)
    with pytest.raises(gs.PlanError, match=law):
        gs.attend(q, x, x, plan)


@pytest.mark.parametrize(
    ("changes", "law"),
    [
        ({"tile_row": torch.tensor([[[0, 2]]]).int()}, "tile_row outside 0…1"),
        ({"query_index": torch.tensor([[[[0, 1], [2, 9]]]]).int()}, "query_index outside -1…3"),
        ({"launch_order": torch.zeros(1, 1, 2).int()}, "permutation of the 2 tiles"),
    ],
)
def test_attend_refuses_tiles_that_break_the_format(changes: dict[str, object], law: str) -> None:
    q, x = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 6, 16)
    with pytest.raises(gs.PlanError, match=law):
        gs.attend(q, x, x, tokens(**changes))


@pytest.mark.parametrize("given", ["svg2", gs.get_method("svg2"), None])
def test_attend_refuses_what_is_no_plan(given: object) -> None:
    x = torch.randn(1, 1, 4, 16)
    with pytest.raises(gs.PlanError, match="must be a SparsePlan; sparse_attention takes a method"):
        gs.attend(x, x, x, given)  # type: ignore[arg-type]


@settings(max_examples=200)
@given(st.data())
def test_attend_refuses_exactly_the_rows_that_do_not_ascend(data: st.DataObject) -> None:
    """Rows share entries and stand in any order; what falls between two rows is no fault."""
    pool = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    place = st.integers(0, len(pool)).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(0, len(pool) - start))
    )
    rows = data.draw(st.lists(place, min_size=3, max_size=3))
    start, count = (torch.tensor(x)[None, None] for x in zip(*rows, strict=True))
    keys = gs.KeyTokens(start=start, count=count.int(), index=torch.tensor(pool).int())
    plan = gs.SparsePlan(num_queries=6, num_keys=6, tile=2, keys=keys)
    x = torch.randn(1, 1, 6, 16)
    listed = [pool[begin : begin + length] for begin, length in rows]
    if all(row == sorted(set(row)) for row in listed):
        gs.attend(x, x, x, plan)
    else:
        with pytest.raises(gs.PlanError, match="must ascend and be unique"):
            gs.attend(x, x, x, plan)


def test_a_plan_for_other_lengths_is_refused_with_both() -> None:
    q = torch.randn(1, 1, 1500, 8)
    plan = gs.Dense().plan(q, q, q)
    short = q[:, :, :500]
    with pytest.raises(gs.PlanError, match="for 1500 queries and 1500 keys, but q has 500"):
        gs.attend(short, q, q, plan)
    assert plan.num_keys == 1500


def test_a_plan_for_other_heads_is_refused() -> None:
    q = torch.randn(2, 4, 64, 8)
    plan = gs.InstaGen(density=0.5).plan(q, q, q)
    with pytest.raises(gs.PlanError, match="batch 2 and 4 heads, but q has batch 1 and 4"):
        gs.attend(q[:1], q[:1], q[:1], plan)
    with pytest.raises(gs.PlanError, match="4 heads, but q has batch 2 and 2 heads"):
        gs.attend(q[:, :2], q[:, :2], q[:, :2], plan)


def test_virtual_keys_are_recomputed_as_means() -> None:
    k, v = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    owner = torch.tensor([[[0, 0, 1, -1, 1, 1], [1, 0, 0, 0, -1, 1]]], dtype=torch.int32)
    keys = gs.KeyTokens(
        start=torch.zeros(1, 1, 1, dtype=torch.int64),
        count=torch.tensor([[[2]]], dtype=torch.int32),
        index=torch.tensor([3, 6], dtype=torch.int32),
        extra_k=torch.zeros(1, 2, 2, 4),
        extra_v=torch.zeros(1, 2, 2, 4),
        extra_of=owner,
    )
    plan = gs.SparsePlan(num_queries=2, num_keys=6, tile=2, keys=keys).refresh(k, v)
    for head in range(2):
        for extra in range(2):
            member = owner[0, head] == extra
            torch.testing.assert_close(
                plan.keys.extra_k[0, head, extra], k[0, head, member].mean(0)
            )
            torch.testing.assert_close(
                plan.keys.extra_v[0, head, extra], v[0, head, member].mean(0)
            )


def test_refresh_leaves_a_plan_without_virtual_keys_alone() -> None:
    plan = tokens()
    assert plan.refresh(torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)) is plan


def test_virtual_keys_that_are_no_means_cannot_be_refreshed() -> None:
    x = torch.randn(1, 1, 6, 4)
    keys = replace(tokens().keys, extra_k=x[:, :, :1], extra_v=x[:, :, :1])
    with pytest.raises(gs.PlanError, match="carry no extra_of"):
        tokens(keys=keys).refresh(x, x)


def test_a_plan_moves_with_its_tensors() -> None:
    plan = tokens(tile_row=torch.tensor([[[1, 0]]], dtype=torch.int32)).to("meta")
    assert plan.device.type == "meta"
    assert plan.tile_row is not None
    assert plan.tile_row.device.type == "meta"


def test_half_a_pair_of_virtual_keys_is_refused() -> None:
    with pytest.raises(gs.PlanError, match="extra_k and extra_v come together"):
        replace(tokens().keys, extra_k=torch.randn(1, 1, 1, 4))


@pytest.mark.parametrize("name", ["index", "count", "start"])
def test_lists_of_another_dtype_are_refused(name: str) -> None:
    """Kernels read what they point at as the format's integers."""
    keys = gs.KeyTokens.from_lists(torch.arange(6).view(1, 1, 2, 3))
    given = getattr(keys, name)
    other = torch.int64 if given.dtype == torch.int32 else torch.int32
    with pytest.raises(gs.PlanError, match=rf"KeyTokens.{name} is {other}, must be {given.dtype}"):
        replace(keys, **{name: given.to(other)})


def test_blocks_and_tiles_of_another_dtype_are_refused() -> None:
    keys = gs.KeyBlocks.from_mask(torch.ones(1, 1, 2, 2, dtype=torch.bool), block=4)
    with pytest.raises(gs.PlanError, match="KeyBlocks.index is torch.int64"):
        replace(keys, index=keys.index.long())
    plan = gs.SparsePlan(num_queries=8, num_keys=8, tile=4, keys=keys)
    for name, wrong in (
        ("query_index", torch.arange(8).view(1, 1, 2, 4)),
        ("tile_row", torch.arange(2).view(1, 1, 2)),
        ("launch_order", torch.arange(2).view(1, 1, 2)),
        ("key_valid", torch.ones(1, 8)),
    ):
        with pytest.raises(gs.PlanError, match=f"SparsePlan.{name} is {wrong.dtype}"):
            replace(plan, **{name: wrong})
