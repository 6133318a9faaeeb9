"""Gradients of plans on a GPU against the reference's, and what they cost."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.kernels import choose_kernel
from gossamer.kernels.flash import unavailable
from gossamer.kernels.transposed import list_causal_tiles, list_tiles
from gradients import check_gradients, run
from training import check_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # flash-attn-4 and its compiler warn of themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLAIN = Options(True, False, False, False, 0, None, False, False, 128, 0.5)


def has_hopper_flash() -> bool:
    """Return whether flash-attn-4 has gradients of block-sparse attention here."""
    return not unavailable(torch.device("cuda")) and torch.cuda.get_device_capability() == (9, 0)


def needs_hopper_flash(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test where it has none."""
    missing = torch.cuda.is_available() and not has_hopper_flash()
    return pytest.mark.skipif(missing, reason="needs flash-attn-4 on a Hopper GPU")(test)


def of_blocks(plan: gs.SparsePlan, shape: Shape, block: int, order: bool = False) -> gs.SparsePlan:
    """Return the plan with random rows of blocks, some without any."""
    rows = (*plan.keys.count.shape, -(-shape.num_keys // block))
    mask = torch.rand(rows, generator=shape.generator()) < 0.5
    mask[:, :, 1:2] = False
    places = None
    if order:
        places = torch.randperm(shape.num_keys, generator=shape.generator()).int().view(1, 1, -1)
    return replace(plan, keys=gs.KeyBlocks.from_mask(mask, block=block, key_order=places))


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *((torch.bfloat16, dim) for dim in (20, 32, 64, 80, 128, 256)),
        (torch.float16, 64),
        *((torch.float32, dim) for dim in (20, 64)),
    ],
)
@settings(max_examples=6)  # most draws compile kernels of their own
@given(shapes(), options(), st.sampled_from([None, 0.3, -0.2, 0.0]))
def test_triton_equals_the_reference(
    dtype: torch.dtype, dim: int, shape: Shape, opt: Options, scale: float | None
) -> None:
    pytest.importorskip("triton")
    shape = replace(shape, dim=dim)
    plan = random_plan(shape, opt)
    tensors = shape.tensors(dtype)
    check_gradients(tensors, plan, "triton", scale=scale, seed=shape.seed, device="cuda")


@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        *((dim, torch.bfloat16) for dim in (64, 96, 128, 256)),
        *((dim, torch.float32) for dim in (64, 128)),
    ],
)
@pytest.mark.parametrize("block", [8, 16, 64, 128, 256])
def test_triton_runs_blocks_of_every_size(
    block: int, dim: int, dtype: torch.dtype, tile: int
) -> None:
    """Shared memory and registers suffice for tiles of 128 and 256 queries."""
    pytest.importorskip("triton")
    shape = Shape(2, 1, 2, 600, 700, dim, block)
    plan = of_blocks(random_plan(shape, replace(PLAIN, tile=tile)), shape, block)
    check_gradients(shape.tensors(dtype), plan, "triton", device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_triton_runs_tokens_of_every_width(dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    shape = Shape(2, 1, 2, 600, 700, dim, 1)
    for tile, weighted in ((128, True), (256, False)):
        virtual = 5 if weighted else 0
        opt = replace(PLAIN, blocks=False, weighted=weighted, virtual=virtual, tile=tile)
        check_gradients(shape.tensors(dtype), random_plan(shape, opt), "triton", device="cuda")


@needs_hopper_flash
@pytest.mark.parametrize("kind", ["plain", "causal", "permuted"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1024, 1024), (900, 900), (300, 1000), (700, 500), (100, 100)]
)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128])
def test_flash_equals_the_reference(dim: int, num_queries: int, num_keys: int, kind: str) -> None:
    """Ragged lengths, two query heads to a KV head, shared rows, an order of keys, empty rows."""
    shape = Shape(2, 2, 2, num_queries, num_keys, dim, 1)
    opt = replace(PLAIN, causal=kind == "causal", permuted=kind == "permuted")
    plan = of_blocks(random_plan(shape, opt), shape, 128, order=kind == "permuted")
    for dtype, scale in ((torch.bfloat16, None), (torch.float16, -0.1)):
        check_gradients(shape.tensors(dtype), plan, "flash", scale=scale, device="cuda")


@needs_hopper_flash
@pytest.mark.parametrize("shared_heads", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_flash_takes_shared_lists_and_gradients_of_any_stride(
    group: int, shared_heads: bool
) -> None:
    """Sums give gradients of stride 0; heads may stand above or beside one another."""
    shape = Shape(2, 2, group, 640, 512, 128, 1)
    opt = replace(PLAIN, shared_heads=shared_heads)
    plan = of_blocks(random_plan(shape, opt), shape, 128).to("cuda")
    tensors = [x.cuda().requires_grad_() for x in shape.tensors(torch.bfloat16)]
    beside = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]
    gs.attend(*tensors, plan, kernel="flash").out.sum().backward()
    gs.attend(*(x.transpose(1, 2) for x in beside), plan, kernel="flash").out.sum().backward()
    for a, b in zip(tensors, beside, strict=True):
        # float32 sums in another order: a rounding to bfloat16 may fall the other way.
        torch.testing.assert_close(b.grad.transpose(1, 2), a.grad, rtol=2**-7, atol=1e-4)


@needs_hopper_flash
def test_auto_takes_flash_for_blocks_of_128_and_triton_for_the_rest() -> None:
    shape = Shape(1, 2, 1, 512, 512, 128, 1)
    q, k, v = (x.cuda().requires_grad_() for x in shape.tensors(torch.bfloat16))
    for block, name in ((128, "flash"), (64, "triton")):
        plan = of_blocks(random_plan(shape, PLAIN), shape, block).to("cuda")
        assert choose_kernel(q, k, v, plan, "auto", gradients=True).name == name
    tokens = random_plan(shape, replace(PLAIN, blocks=False)).to("cuda")
    assert choose_kernel(q, k, v, tokens, "auto", gradients=True).name == "triton"


@pytest.mark.filterwarnings("ignore::UserWarning")  # inductor's advice about the GPU
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", ["triton", "flash"])
def test_a_compiled_block_trains(kernel: str, backend: str) -> None:
    """Permuted queries and keys, two query heads to a KV head, and a tile that reads nothing."""
    pytest.importorskip("triton")
    if kernel == "flash" and not has_hopper_flash():
        pytest.skip("needs flash-attn-4 on a Hopper GPU")
    torch.compiler.reset()
    shape = Shape(2, 2, 2, 500, 500, 64, 1)
    permuted = random_plan(shape, replace(PLAIN, permuted=True))
    plans = [of_blocks(permuted, shape, 128, order=True)]
    if kernel == "triton":
        plans.append(random_plan(shape, replace(PLAIN, blocks=False, weighted=True)))
    for plan in plans:
        check_training(
            shape,
            plan,
            kernel,
            backend=backend,
            dtype=torch.bfloat16,
            device="cuda",
            tolerance=2**-6,  # two roundings to bfloat16: compiled sums are in another order
        )


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")  # torch's word for the mode
@pytest.mark.parametrize("kernel", ["triton", "flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_does_not_wait_for_the_device(kernel: str, causal: bool) -> None:
    pytest.importorskip("triton")
    if kernel == "flash" and not has_hopper_flash():
        pytest.skip("needs flash-attn-4 on a Hopper GPU")
    shape = Shape(2, 2, 2, 1000, 1000, 128, 1)
    plan = of_blocks(random_plan(shape, replace(PLAIN, causal=causal)), shape, 128).to("cuda")
    tensors = [x.cuda().requires_grad_() for x in shape.tensors(torch.bfloat16)]
    for strict in (False, True):
        if strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            gs.attend(*tensors, plan, kernel=kernel).out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_triton_gives_the_same_bits_again_for_blocks() -> None:
    pytest.importorskip("triton")
    shape = Shape(2, 2, 2, 1000, 1000, 128, 1)
    plan = of_blocks(random_plan(shape, PLAIN), shape, 64).to("cuda")
    tensors = tuple(x.cuda() for x in shape.tensors(torch.bfloat16))
    ones = (torch.ones(2, 4, 1000, 128, device="cuda"), torch.ones(2, 4, 1000, device="cuda"))
    first, second = (run(tensors, plan, ones, "triton") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*determinis:UserWarning")
@pytest.mark.parametrize("blocks", [False, True])
def test_triton_leaves_alone_what_is_not_read(blocks: bool) -> None:
    """NaN in keys and values and in new memory reaches no gradient, and what is not read has 0."""
    pytest.importorskip("triton")
    shape = Shape(2, 2, 1, 300, 700, 128, 4)
    opt = replace(PLAIN, blocks=blocks, padded=True, density=0.1, shared_heads=True)
    plan = random_plan(shape, opt)
    read = (plan.weights() > 0).any(2).any(1)[:, None, :, None].cuda()
    q, k, v = (x.cuda() for x in shape.tensors(torch.bfloat16))
    ones = (torch.ones_like(q), torch.ones(q.shape[:3], device="cuda"))
    broken = [x.masked_fill(~read, torch.nan) for x in (k, v)]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        got = run((q, *broken), plan.to("cuda"), ones, "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    for grad in got:
        assert grad.isfinite().all()
    for grad in got[1:]:
        assert not grad.masked_fill(read, 0.0).any()


def test_transposed_lists_are_the_cpus_and_small() -> None:
    """32 heads of 64 Ki tokens: the lists of whole and cut blocks take 4 bytes a pair each."""
    count = torch.full((1, 32, 512), 100, dtype=torch.int32)
    index = torch.rand(1, 32, 512, 512).argsort(-1)[..., :100].sort(-1).values.int()
    keys = gs.KeyBlocks(block=128, count=count, index=index)
    plan = gs.SparsePlan(num_queries=65536, num_keys=65536, tile=128, keys=keys, causal=True)
    there = plan.to("cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lists = [list_tiles(there, there.keys), *list_causal_tiles(there, there.keys)]
    pairs = 32 * 512 * 512
    assert torch.cuda.max_memory_allocated() - before < 3 * 5 * pairs + (512 << 20)
    want = [list_tiles(plan, plan.keys), *list_causal_tiles(plan, plan.keys)]
    for a, b in zip(lists, want, strict=True):
        assert torch.equal(a.num_tiles.cpu(), b.num_tiles)
        kept = torch.arange(512) < b.num_tiles[..., None]
        assert torch.equal(a.tiles.cpu()[kept], b.tiles[kept])
