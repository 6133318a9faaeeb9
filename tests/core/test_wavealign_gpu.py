"""WaveAlign's kernels give torch's order: on the CPU, through Triton's interpreter."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.order import WaveAlign
from gossamer.order import wavealign as by_lists
from gossamer.order.gpu import wavealign as gpu
from gossamer.plan.rows import expand, tile_queries, tile_rows

HERE = Path(__file__).parent
COMPILE = HERE / "compile_planning.py"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by the test of each part")
# What the kernels share with torch's version: the columns to start from, and what is rounding.
SALT, DEPENDENT = by_lists._SALT, by_lists._DEPENDENT


@pytest.mark.skipif(INTERPRETED, reason="starts what runs interpreted")
@pytest.mark.parametrize(
    "part",
    [
        "interpreted_masks or interpreted_points",
        "interpreted_waves or interpreted_orders or interpreted_heads",
        "waves_run or keep_their_order or share_a_row or read_the_same or band_again",
    ],
)
def test_it_orders_as_torch_does_and_passes_its_tests(part: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_XDIST_WORKER_COUNT": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", part]
    command += [__file__] if "interpreted" in part else [str(HERE / "test_wavealign.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_it_compiles_for_hopper_without_spills() -> None:
    """And all programs of a product at 364K tokens and 4 heads are resident on 132 SMs at once."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    kernels = [f"wave-{name}" for name in gpu.KERNELS]
    command = [sys.executable, str(COMPILE), *kernels]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    code = dict(zip(kernels, map(json.loads, result.stdout.splitlines()), strict=True))
    assert not any(counts["spills"] for counts in code.values()), code
    for name, programs in (("multiply", 11), ("transpose", 3)):
        threads = 32 * gpu.configuration(name)[1]["num_warps"]
        assert programs * threads * code[f"wave-{name}"]["registers"] <= 65536, name


def lines(plan: gs.SparsePlan) -> tuple[by_lists._Masks, torch.Tensor, torch.Tensor]:
    """The masks of torch's version, and the tiles that take part and their counts [B * H, T]."""
    shape = by_lists._axes(plan)
    line = torch.arange(shape[0] * shape[1])
    at = (line // shape[1], line % shape[1])
    rows = expand(tile_rows(plan), *shape)[at]
    count = expand(plan.keys.count, *shape)[at].long().gather(1, rows)
    active = expand((tile_queries(plan) >= 0).any(-1), *shape)[at] & (count > 0)
    return by_lists._block_lists(plan, at, rows, active, by_lists._width(plan)), active, count


def kernel_masks(plan: gs.SparsePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The masks [B * H, T, P] and numbers [B * H, T] that the kernels write."""
    columns = by_lists._num_columns(plan)
    lists = gpu._Lists(plan, by_lists._axes(plan), columns, by_lists._BLOCK)
    return lists.mask(slice(0, len(lists.number))), lists.number


def dense(lists: by_lists._Masks, num_columns: int) -> torch.Tensor:
    """Lists as a mask [x, T, C]."""
    mask = torch.zeros(*lists.column.shape[:2], num_columns)
    return mask.scatter_add_(2, lists.column, lists.value)


@interpreted
@settings(max_examples=40)
@given(shapes(max_tokens=150), options())
def test_interpreted_masks(shape: Shape, opt: Options) -> None:
    plan = random_plan(shape, opt)
    lists, active, count = lines(plan)
    mask, number = kernel_masks(plan)
    columns = by_lists._num_columns(plan)
    assert torch.equal(number.long(), count * active)
    assert torch.equal(mask[..., :columns].float(), dense(lists, columns))
    assert (mask[..., columns:] == 0).all()


@interpreted
def test_interpreted_masks_of_long_lists() -> None:
    """More entries and blocks than one step of the kernels."""
    g = torch.Generator().manual_seed(0)
    read = torch.rand(1, 1, 3, 1100, generator=g) < torch.tensor([0.05, 0.5, 1.0])[:, None]
    blocks = gs.KeyBlocks.from_mask(read, block=128)
    token = read.repeat_interleave(128, dim=-1) & (torch.rand(1100 * 128, generator=g) < 0.9)
    index = torch.argsort((~token).byte(), dim=-1, stable=True)
    tokens = gs.KeyTokens.from_lists(index, count=token.sum(-1))
    for keys, want in ((blocks, read), (tokens, token.unflatten(-1, (-1, 128)).sum(-1))):
        plan = gs.SparsePlan(num_queries=300, num_keys=1100 * 128, tile=128, keys=keys)
        assert torch.equal(kernel_masks(plan)[0][0, :, :1100].long(), want[0, 0].long())


@interpreted
@settings(max_examples=40)
@given(shapes(max_tokens=150), options(), st.integers(1, 8))
def test_interpreted_points(shape: Shape, opt: Options, iters: int) -> None:
    """As torch's up to rounding, where there are two directions to find."""
    plan = random_plan(shape, opt)
    lists, active, _ = lines(plan)
    mask, number = kernel_masks(plan)
    got = gpu.embed(mask, number, iters, SALT, DEPENDENT)
    want = lists.embed(2, iters)
    matrix = dense(lists, by_lists._num_columns(plan)).double()
    for line, used in enumerate(active):
        rows = matrix[line, used]
        few = len(rows) < 3 or (rows == rows[:1]).all()
        if few:  # exactly: such tiles keep their order
            assert (got[:, line, used] == 0).all()
            continue
        sizes = torch.linalg.svdvals(rows - rows.mean(0))
        if len(sizes) < 2 or sizes[1] < 0.1 * sizes[0]:
            continue  # the second column may be rounding, which the two versions tell differently
        # Rounding of some 2^-22 of the products of counts up to 128, which centring and
        # Gram-Schmidt divide by the share of them that is left.
        left = float(sizes[1] / rows.norm()) * float((sizes[1] / sizes[0]).square())
        atol = 16 * 2.0**-22 * iters / left
        torch.testing.assert_close(got[:, line, used].mT, want[line, used], rtol=0, atol=atol)


@interpreted
@pytest.mark.parametrize("wave", [1, 7, 64])
def test_interpreted_waves(wave: int) -> None:
    """Bit for bit those of torch's version at the same angles, ties among them."""
    g = torch.Generator().manual_seed(wave)
    turn = torch.randint(-31, 32, (5, 1500), generator=g) * 0.1
    turn[0] = 2 * torch.pi * (torch.rand(1500, generator=g) - 0.5)
    number = torch.randint(0, 6, (5, 1500), generator=g).int()
    number[1], number[2, 2:], number[3, :-3] = 0, 0, 0
    number[2, :2], number[3, -3:] = torch.tensor([1, 2]), torch.tensor([1, 2, 1])
    turn[2] = 0  # what `place` writes where fewer than 3 tiles take part
    active = number > 0
    points = torch.stack([turn.cos(), turn.sin()], dim=-1)
    angle = torch.atan2(points[..., 1], points[..., 0]).masked_fill(~active, torch.inf)
    first = torch.argsort((~active).byte(), dim=-1, stable=True)
    want = by_lists._in_waves(by_lists._by_angle(points, active), number.long(), active, wave)
    want = torch.where(active.sum(-1, keepdim=True) < 3, first, want)
    assert torch.equal(gpu._in_waves(angle, number, wave).long(), want)


def clustered(seed: int, *shape: int, columns: int = 90) -> torch.Tensor:
    """Masks [*shape, columns] of rows around five kinds, all rows different; some are empty."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.rand(*shape[:-1], 5, columns, generator=g) < 0.3
    of = torch.randint(5, shape, generator=g)[..., None].expand(*shape, columns)
    mask = kind.gather(-2, of) ^ (torch.rand(*shape, columns, generator=g) < 0.05)
    return mask & (torch.rand(*shape, 1, generator=g) < 0.9)


def plans(*, blocks: bool) -> dict[str, gs.SparsePlan]:
    """Plans whose angles lie apart; masks are read as blocks of 128 or as every third key."""

    def plan(mask: torch.Tensor) -> gs.SparsePlan:
        keys = gs.KeyBlocks.from_mask(mask, block=128)
        if not blocks:
            token = mask.repeat_interleave(128, dim=-1)
            token &= torch.arange(token.shape[-1]) % 3 == 0
            index = torch.argsort((~token).byte(), dim=-1, stable=True)
            count = token.sum(-1)
            keys = gs.KeyTokens.from_lists(index[..., : int(count.max())], count=count)
        length = 128 * mask.shape[2]
        return gs.SparsePlan(num_queries=length, num_keys=128 * 90, tile=128, keys=keys)

    g = torch.Generator().manual_seed(1)
    row = torch.randint(25, (2, 2, 40), generator=g).int()
    of_row = {"num_queries": 40 * 128, "tile_row": row}
    place = torch.rand(1, 1, 32 * 128, generator=g).argsort(-1).argsort(-1)
    query = torch.where(place < 31 * 128, place, -1).view(1, 1, 32, 128).int()
    query[:, :, 5] = -1  # a tile of queries that are not there
    return {
        "batch 2": plan(clustered(0, 2, 2, 30)),
        "shared heads": plan(clustered(1, 1, 1, 30)),
        "tile_row": replace(plan(clustered(2, 1, 2, 25)), **of_row),
        "tile_row of shared rows": replace(plan(clustered(3, 1, 1, 25)), **of_row),
        "empty tiles": replace(plan(clustered(4, 1, 2, 32)), query_index=query),
    }


@interpreted
@pytest.mark.parametrize(("blocks", "wave"), [(True, 1), (True, 16), (False, 16)])
def test_interpreted_orders(blocks: bool, wave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads at once, one or two at once, and by torch."""

    def launched(plan: gs.SparsePlan, mask_bytes: int) -> torch.Tensor:
        monkeypatch.setattr(gpu, "_MASK_BYTES", mask_bytes)
        order = WaveAlign(skip="never", wave=wave).order(plan).launch_order
        assert order is not None
        assert order.dtype == torch.int32
        if plan.tile_row is None:
            return order
        # A CPU's atan2 rounds by the place in a vector: tiles that read the same may change places.
        return plan.tile_row.expand_as(order).gather(2, order.long())

    for name, plan in plans(blocks=blocks).items():
        by_torch, at_once = (launched(plan, size) for size in (1, 1 << 20))
        assert torch.equal(at_once, by_torch), name
        if blocks:
            assert torch.equal(launched(plan, 8000), by_torch), name


@interpreted
def test_interpreted_heads_of_a_plan_that_is_no_dense_storage() -> None:
    """Lists that are views: every second head, of rows twice as wide."""
    mask = clustered(5, 1, 4, 20)
    order = WaveAlign(skip="never", wave=4)
    whole = gs.KeyBlocks.from_mask(mask, block=128)
    plan = gs.SparsePlan(num_queries=20 * 128, num_keys=90 * 128, tile=128, keys=whole)
    half = replace(whole, count=whole.count[:, ::2], index=whole.index[:, ::2, :, :60])
    assert half.count.max() < 60
    want = order.order(plan).launch_order[:, ::2]
    assert torch.equal(order.order(replace(plan, keys=half)).launch_order, want)
