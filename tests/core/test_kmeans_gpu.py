"""k-means' Triton kernels without a GPU: in Triton's interpreter, and compiled for Hopper.

Triton decides at import whether it interprets, so both run in processes of their own. Run as a
script, this file compiles what one k-means launches and prints what came of it:

python tests/core/test_kmeans_gpu.py bfloat16:128 float32:80
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gossamer.group import Clusters, Draw, kmeans
from gossamer.group.gpu import kmeans as gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DRAW = Draw(seed=0, layer=0, step=0, heads=torch.arange(64), salt=0)
CASES = ["bfloat16:128", "float16:256", "float32:80"]
# Of rounding centroids; float32 is not rounded.
UNIT = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def run(command: list[str], **variables: str) -> str:
    environment = {**os.environ, **variables}
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter itself")
def test_it_passes_the_tests_below_and_those_of_torchs_version() -> None:
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    names = ("a_warm_start", "a_converged_head", "empty_clusters", "more_clusters", "inactive")
    here = Path(__file__)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(here)]
    command += [str(here.with_name("test_group.py")), "-k", " or ".join((here.stem, *names))]
    out = run(command, TRITON_INTERPRET="1", PYTEST_XDIST_WORKER_COUNT="1")
    assert " passed" in out


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_it_compiles_for_hopper() -> None:
    """Tensor cores through wgmma, copies that run ahead, no spills; two programs share an SM."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    of_case = json.loads(run([__file__, *CASES]))
    assert of_case.keys() == set(CASES)
    for case, code in of_case.items():
        assert code.keys() >= {"prepare", "assign", "add", "finish"}
        for name, counts in code.items():
            assert counts["spills"] == 0, f"{case}: {name}"
            assert counts["slow_products"] == 0, f"{case}: {name}"
        assign = code["assign"]
        assert assign["products"] >= 8
        assert assign["copies"] >= 4
        if not case.startswith("float32"):
            assert 2 * assign["registers"] * assign["threads"] <= 65536
            assert 2 * (assign["shared"] + 1024) <= 228 << 10


def tokens(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, centre: float = 3.0
) -> torch.Tensor:
    """Return tokens [B, H, N, D] around a point far from zero."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) + centre).to(dtype)


def start(x: torch.Tensor, num_clusters: int, seed: int = 1) -> torch.Tensor:
    """Return float32 centroids that are no tokens."""
    g = torch.Generator().manual_seed(seed)
    pick = torch.randint(x.shape[2], (num_clusters,), generator=g)
    return x[:, :, pick].float() + 0.3 * torch.randn(num_clusters, x.shape[3], generator=g)


def by_torch(monkeypatch: pytest.MonkeyPatch, *args: object, **kwargs: object) -> Clusters:
    """Return what the version without kernels finds."""
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "takes", lambda _: False)
        return kmeans(*args, draw=DRAW, **kwargs)


def check_labels(
    x: torch.Tensor, before: torch.Tensor, got: Clusters, want: Clusters, used: list[int]
) -> None:
    """Labels are the nearest of `before` but for rounding, and where that is clear those of torch.

    The kernel scores centroids moved by u |c - o| at most, with u the unit roundoff of the tokens'
    type (and by half its least number in each axis), in float32 sums of D + 2 terms.
    """
    dim, eps = x.shape[3], 2.0**-23
    for b, h in ((b, h) for b in range(x.shape[0]) for h in range(x.shape[1])):
        c = before[b, h, : used[b]].double()
        token = x[b, h].double()
        origin = c[c.square().sum(-1).argmin()]
        least = 2.0**-25 * math.sqrt(dim) if x.dtype == torch.float16 else 0.0
        moved = (c - origin).norm(dim=-1) * UNIT[x.dtype] + least
        size = token.norm(dim=-1).amax() + c.norm(dim=-1).amax()
        rounding = (dim + 2) * eps * size * (c - origin).norm(dim=-1).amax()
        distance = torch.cdist(token, c, compute_mode="donot_use_mm_for_euclid_dist")
        limit = ((distance + moved).square() + 4 * rounding).sqrt().amin(-1)  # of the moved one
        label = got.labels[b, h]
        own = distance.gather(1, label[:, None])[:, 0]
        slack = limit + moved[label] - own
        assert slack.min() >= 0, f"{float(slack.min())} below the bound"
        rival = (distance - moved).scatter(1, distance.argmin(-1, keepdim=True), torch.inf)
        clear = rival.amin(-1) > limit
        assert torch.equal(label[clear], want.labels[b, h][clear])
        assert len(c) == 1 or clear.double().mean() > 0.9


def check_means(
    x: torch.Tensor, before: torch.Tensor, got: Clusters, valid: torch.Tensor | None = None
) -> None:
    """Sizes are exact, centroids the means of members, but for float32 sums."""
    batch, heads, length, _ = x.shape
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool)
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        label = got.labels[b, h][valid[b]]
        token = x[b, h][valid[b]].double()
        size = torch.bincount(label, minlength=before.shape[2])
        assert torch.equal(size, got.sizes[b, h])
        sums = torch.zeros_like(before[b, h], dtype=torch.float64).index_add_(0, label, token)
        mean = torch.where(size[:, None] == 0, before[b, h].double(), sums / size[:, None])
        eps = (8 + math.log2(length)) * 2.0**-24  # pairwise sums in pieces of 64
        allowed = eps * max(float(token.abs().amax()) if len(token) else 0.0, 1e-30)
        error = (got.centroids[b, h].double() - mean).abs().amax()
        assert error <= allowed, f"{float(error)} above {allowed}"


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter that a test above starts")
class TestInTheInterpreter:
    """The kernels against torch's version."""

    @pytest.fixture(autouse=True)
    def fill(self) -> Iterator[None]:
        """Fill fresh memory with NaN and the greatest integer, so that a forgotten write fails."""
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize(
        ("shape", "num_clusters"),
        [
            ((1, 1, 600, 64), 70),  # two chunks, two steps of centroids
            ((2, 1, 301, 20), 5),  # clusters of several pieces, D no power of two
            ((1, 1, 40, 3), 1),
            ((1, 2, 5, 130), 9),
        ],
    )
    def test_an_iteration_gives_nearest_centroids_and_means(
        self,
        shape: tuple[int, ...],
        num_clusters: int,
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        x = tokens(*shape, dtype=dtype)
        init = start(x, num_clusters)
        copy = init.clone()
        got = kmeans(x, num_clusters, draw=DRAW, init=init, iterations=1)
        want = by_torch(monkeypatch, x, num_clusters, init=init, iterations=1)
        assert torch.equal(init, copy)
        assert got.labels.dtype == got.sizes.dtype == torch.int64
        assert got.centroids.dtype == torch.float32
        check_labels(x, init, got, want, [num_clusters] * shape[0])
        check_means(x, init, got)

    def test_padding_and_inactive_clusters_count_nowhere(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Padding anywhere, all of a row's, and NaN in it; the same to the bit as without it."""
        x = tokens(3, 1, 90, 16)
        valid = torch.rand(3, 90, generator=torch.Generator().manual_seed(2)) < 0.7
        valid[2] = False
        padded = x.masked_fill(~valid[:, None, :, None], torch.nan)
        active = torch.tensor([4, 9, 1])
        options = {"valid": valid, "active": active, "iterations": 2}
        got = kmeans(padded, 9, draw=DRAW, **options)
        want = by_torch(monkeypatch, padded, 9, **options)
        assert torch.equal(got.labels, want.labels)
        assert torch.equal(got.sizes, want.sizes)
        torch.testing.assert_close(got.centroids, want.centroids)
        assert (got.sizes[0, :, 4:] == 0).all()
        for b in range(2):
            kept = x[b : b + 1, :, valid[b]]
            alone = kmeans(kept, int(active[b]), draw=DRAW, iterations=2)
            assert torch.equal(alone.labels[0], got.labels[b, :, valid[b]])
            assert torch.equal(alone.centroids[0], got.centroids[b, :, : active[b]])

    def test_the_lowest_of_equal_clusters_wins(self) -> None:
        """Small integers, so that every score is exact and ties abound."""
        g = torch.Generator().manual_seed(5)
        x = torch.randint(-2, 3, (1, 1, 130, 3), generator=g).half()
        init = torch.randint(-2, 3, (1, 1, 70, 3), generator=g).float()
        got = kmeans(x, 70, draw=DRAW, init=init, iterations=1)
        distance = (x[0, 0, :, None].float() - init[0, 0]).square().sum(-1)
        first = (distance == distance.amin(-1, keepdim=True)).byte().argmax(-1)
        assert torch.equal(got.labels[0, 0], first)

    def test_a_settled_head_stops_and_others_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        centre = 10 * tokens(4, 8, centre=0.0)
        settled = centre.repeat(25, 1) + 0.1 * tokens(100, 8, centre=0.0)
        both = torch.stack([settled, tokens(100, 8)])[None]
        init = torch.cat([centre[None, None], start(both[:, 1:], 4)], 1)
        for iterations in (2, 5):
            got = kmeans(both, 4, draw=DRAW, init=init, iterations=iterations)
            want = by_torch(monkeypatch, both, 4, init=init, iterations=iterations)
            assert torch.equal(got.labels, want.labels)
            assert torch.equal(got.sizes, want.sizes)
            torch.testing.assert_close(got.centroids, want.centroids)

    def test_a_tolerance_keeps_the_centroids_it_was_met_with(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x = tokens(1, 2, 100, 8)
        init = start(x, 6)
        options = {"init": init, "iterations": 4, "tolerance": 0.5}
        got = kmeans(x, 6, draw=DRAW, **options)
        want = by_torch(monkeypatch, x, 6, **options)
        assert torch.equal(got.labels, want.labels)
        torch.testing.assert_close(got.centroids, want.centroids)

    def test_empty_clusters_that_are_put_far_away_cost_no_precision(self) -> None:
        x = tokens(1, 1, 100, 16, dtype=torch.float16)
        init = start(x, 10)
        far = torch.cat([torch.full((1, 1, 30, 16), 1e4), init, init + 1e5], 2)
        got = kmeans(x, 50, draw=DRAW, init=far, iterations=1)
        want = kmeans(x, 10, draw=DRAW, init=init, iterations=1)
        assert torch.equal(got.labels, want.labels + 30)
        assert torch.equal(got.centroids[:, :, :30], far[:, :, :30])
        assert torch.equal(got.centroids[:, :, 30:40], want.centroids)

    def test_memory_order_batch_and_heads_change_nothing(self) -> None:
        x = tokens(2, 2, 70, 24)
        init = start(x, 4)
        other = x.transpose(1, 2).contiguous().transpose(1, 2)
        every, again, one = (
            kmeans(tokens, 4, draw=DRAW, init=init, iterations=2)
            for tokens, init in ((x, init), (other, init), (x[1:, 1:], init[1:, 1:]))
        )
        for name in ("labels", "sizes", "centroids"):
            assert torch.equal(getattr(every, name), getattr(again, name))
            assert torch.equal(getattr(every, name)[1:, 1:], getattr(one, name))


class Recorder:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self, kernel: object, seen: dict[str, tuple[object, tuple, dict]]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        self.seen[self.kernel.__name__] = (self.kernel, args, kwargs)


def compile_all(dtype: torch.dtype, dim: int) -> dict[str, dict[str, int]]:
    """Compile every kernel as one k-means launches it; return what counts."""
    seen: dict[str, tuple[object, tuple, dict]] = {}
    gpu._kernels = lambda module, *names: [Recorder(getattr(module, n), seen) for n in names]
    x = torch.zeros(1, 2, 300, dim, dtype=dtype)
    options = {"valid": None, "active": None, "iterations": 1, "tolerance": 1e-4}
    gpu.lloyd(x, torch.zeros(1, 2, 100, dim), **options)
    return {name: compile_one(*launch) for name, launch in seen.items()}


def compile_one(kernel: object, args: tuple, kwargs: dict) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.float32: "fp32"}
    names |= {torch.bfloat16: "bf16", torch.float16: "fp16"}
    options = {
        n: kwargs.pop(n) for n in ("num_warps", "num_stages", "enable_fp_fusion") & kwargs.keys()
    }
    signature, constants, hints = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = kwargs[param.name] if param.name in kwargs else args[place]
        signature[param.name] = "constexpr"
        if param.name in kwargs or value is None:
            constants[place,] = value
            continue
        aligned = isinstance(value, torch.Tensor)
        if aligned:
            signature[param.name] = "*" + names[value.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = not param.do_not_specialize and value % 16 == 0
        if aligned:
            hints[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ([tools / "nvdisasm", "-c"], [tools / "cuobjdump", "-res-usage"])
        )
    return {
        "products": code.count("HGMMA"),
        "slow_products": code.count(" HMMA"),
        "copies": code.count("LDGSTS"),
        "spills": code.count(" STL"),
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "shared": binary.metadata.shared,
        "threads": 32 * options["num_warps"],
    }


if __name__ == "__main__":
    parts = ((case, *case.split(":")) for case in sys.argv[1:])
    print(json.dumps({case: compile_all(getattr(torch, t), int(dim)) for case, t, dim in parts}))
