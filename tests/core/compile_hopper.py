"""Compile the Hopper kernel for compute capability 9.0 and print what came of it; needs no GPU.

python tests/core/compile_hopper.py [dim=64] [float16] [block=64] [weights] [virtual] [queries]
                                    [rows] [launch] [causal] [padded] [order] [window]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from gossamer.kernels import hopper
from gossamer.kernels.hopper.forward import forward

OPTIONAL = {
    "weight_ptr": "weights",
    "extra_k_ptr": "virtual",
    "extra_v_ptr": "virtual",
    "query_ptr": "queries",
    "tile_row_ptr": "rows",
    "launch_ptr": "launch",
    "order_ptr": "order",
    "valid_ptr": "padded",
    "length_ptr": "causal",
    "whole_ptr": "causal",
}
VALUES = ("q_ptr", "k_ptr", "v_ptr", "extra_k_ptr", "extra_v_ptr", "out_ptr")
TYPES = {"lse_ptr": "fp32", "weight_ptr": "fp32", "start_ptr": "i64", "valid_ptr": "u8"}


def compile_for_hopper(features: dict[str, str]) -> str:
    """Return the machine code, disassembled."""
    dim, block = int(features.get("dim", 128)), int(features.get("block", 0))
    constants: dict[str, object] = {
        "D": dim,
        "BLOCK": block,
        "STAGES": hopper._stages(dim),
        "WIDE": False,
        "HAS_WEIGHTS": "weights" in features,
        "CAUSAL": "causal" in features,
        "WINDOW": "window" in features,
        **hopper._REGISTERS,
    }
    constants |= {name: None for name, flag in OPTIONAL.items() if flag not in features}
    if block:
        constants["start_ptr"] = None
    dtype = "fp16" if "float16" in features else "bf16"
    signature, values, hints = {}, {}, {}
    for place, name in enumerate(forward.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[place,] = constants[name]
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


if __name__ == "__main__":
    given = dict(word.split("=") if "=" in word else (word, "") for word in sys.argv[1:])
    lines = compile_for_hopper(given).splitlines()
    products = [line for line in lines if "HGMMA" in line]
    counts = {
        "products": len(products),
        # A product that ends a group; where products wait for one another, every one does.
        "groups": sum("gsb0" in line for line in products),
        "copies": sum("LDGSTS" in line and ".128" in line for line in lines),
        "spills": sum(" STL" in line for line in lines),
    }
    # What stands between the two waits of a step runs beside its second product.
    beside, open_ = 0, False
    for line in lines:
        if "WARPGROUP.DEPBAR" in line:
            open_ = "gsb0, 0x1" in line
        beside += open_ and "MUFU.EX2" in line
    counts["exponentials beside a product"] = beside
    counts["repacks"] = sum(" PRMT " in line for line in lines)
    print(json.dumps(counts))
