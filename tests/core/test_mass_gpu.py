"""Planning's kernels on the CPU, through Triton's interpreter, and the machine code they become."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = HERE / "gpu_planning_cases.py"
COMPILE = HERE / "compile_planning.py"


@pytest.mark.parametrize("part", ["mass or saliency", "top_keys", "pddp"])
def test_kernels_equal_the_torch_versions(part: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_XDIST_WORKER_COUNT": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    result = subprocess.run(
        [*command, "-k", part], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def test_kernels_compile_for_hopper_to_tensor_core_products_without_spills() -> None:
    """In a process of its own: another test may have told Triton to interpret."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    products = {
        "mass": 16,  # 8 steps of 16 of the head dim, in whole steps and in the last one
        "mass float16 causal padded": 16,
        "attend": 32,  # 64 of 128 queries to a warpgroup's product
        "attend values": 24,
        "top": 0,
        "pddp-moments": 4,
        "pddp-axis": 0,
        "pddp-project": 0,
        "pddp-part": 0,
        "pddp-split": 4,
    }
    command = [sys.executable, str(COMPILE), *products]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    code = dict(zip(products, map(json.loads, result.stdout.splitlines()), strict=True))
    for kernel, counts in code.items():
        found = {key: counts[key] for key in ("products", "slow_products", "spills")}
        want = {"products": products[kernel], "slow_products": 0, "spills": 0}
        assert found == want, kernel
    # Programs that share a multiprocessor: 227 KiB of shared memory, 65,536 registers.
    for kernel, programs, threads in (
        ("mass", 3, 128),
        ("attend", 3, 128),
        ("pddp-moments", 2, 256),
        ("pddp-split", 2, 256),
    ):
        assert programs * (code[kernel]["shared"] + 1024) <= 227 * 1024
        assert programs * threads * code[kernel]["registers"] <= 65536
