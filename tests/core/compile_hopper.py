"""Compile the Hopper kernel for compute capability 9.0 and print what came of it; needs no GPU.

python tests/core/compile_hopper.py [dim=64] [float16] [block=64] [weights] [virtual] [queries]
                                    [causal] [padded] [order] [window] [bulk]
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from gossamer.kernels import hopper
from gossamer.kernels.hopper.forward import forward

OPTIONAL = {
    "weight_ptr": "weights",
    "extra_k_ptr": "virtual",
    "extra_v_ptr": "virtual",
    "query_ptr": "queries",
    "order_ptr": "order",
    "valid_ptr": "padded",
    "sink_ptr": "padded",
}
VALUES = ("q_ptr", "k_ptr", "v_ptr", "extra_k_ptr", "extra_v_ptr", "out_ptr")
TYPES = {"lse_ptr": "fp32", "weight_ptr": "fp32", "table_ptr": "i64", "valid_ptr": "u8"}


def compile_for_hopper(features: dict[str, str]) -> str:
    """Return the machine code, disassembled."""
    dim, block = int(features.get("dim", 128)), int(features.get("block", 0))
    constants: dict[str, object] = {
        "D": dim,
        "BLOCK": block,
        "STAGES": hopper._stages(dim),
        "WIDE": False,
        "SAME_STRIDE": True,
        "HAS_WEIGHTS": "weights" in features,
        "CAUSAL": "causal" in features,
        "WINDOW": "window" in features,
        **hopper._REGISTERS,
    }
    constants |= {name: None for name, flag in OPTIONAL.items() if flag not in features}
    if "bulk" not in features:
        constants |= dict.fromkeys(("k_desc", "v_desc"))
    dtype = "fp16" if "float16" in features else "bf16"
    signature, values, hints = {}, {}, {}
    for place, name in enumerate(forward.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[place,] = constants[name]
        elif name.endswith("_desc"):
            layout = gl.NVMMASharedLayout(128, 16, 2)
            signature[name] = f"tensordesc<{dtype}[{block},{dim}],{layout!r}>"
        elif name.endswith("_ptr"):
            signature[name] = "*" + TYPES.get(name, dtype if name in VALUES else "i32")
            hints[place,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            if name[:2] in ("q_", "k_", "v_") or name.startswith(("out_", "extra_")):
                hints[place,] = [["tt.divisibility", 16]]
    source = GluonASTSource(forward, signature, values, hints)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_spill(line: str) -> bool:
    return " STL" in line or " LDL" in line


def innermost_loops(lines: list[str]) -> list[list[str]]:
    """Return the instructions of every loop that holds no other."""
    begin = {line[:-1]: at for at, line in enumerate(lines) if line.startswith(".L_")}
    ends = [(at, re.search(r"BRA `\((\.L_\w+)\)", line)) for at, line in enumerate(lines)]
    loops = [(begin[m[1]], at) for at, m in ends if m and begin[m[1]] < at]
    own = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[x for x in lines[a:b] if re.search(r"/\*[0-9a-f]{4,5}\*/", x)] for a, b in own]


if __name__ == "__main__":
    given = dict(word.split("=") if "=" in word else (word, "") for word in sys.argv[1:])
    lines = compile_for_hopper(given).splitlines()
    products = [line for line in lines if "HGMMA" in line]
    steps, copying = [], []
    for loop in innermost_loops(lines):
        size = {"instructions": len(loop), "spills": sum(is_spill(line) for line in loop)}
        if any("HGMMA" in line for line in loop):
            steps.append(size)
        elif any("LDGSTS" in line for line in loop):
            copying.append(size)
    counts = {
        "products": len(products),
        # A product that ends a group; where products wait for one another, every one does.
        "groups": sum("gsb0" in line for line in products),
        "bulk": sum("UTMALDG" in line for line in lines),
        "copies": sum("LDGSTS" in line and ".128" in line for line in lines),
        "spills": sum(is_spill(line) for line in lines),
        "steps": steps,
        "copying": copying,
    }
    print(json.dumps(counts))
