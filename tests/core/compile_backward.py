"""Compile the Triton backward kernels for compute capability 9.0 and print what came; no GPU.

python tests/core/compile_backward.py KERNEL ..., each a name and words for its features:

"queries [add] [causal] [window] [weights] [extra] [valid] [block=128] [order] [dim=64] [float32]"
"keys [causal] [window] [order] [block=128] [tile=128] [dim=64] [float32]"

Further words name=value are known when compiling, as Triton knows arguments of 1.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gossamer.kernels.triton import backward, launch

DTYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
TYPES = dict.fromkeys(["lse_ptr", "d_lse_ptr", "delta_ptr", "log_weight_ptr"], "*fp32")
TYPES |= {"start_ptr": "*i64", "key_valid_ptr": "*u8", "scale": "fp32"}
OF_DTYPE = ("q", "k", "v", "extra_k", "extra_v", "out", "d_out", "d_q")
FLAGS = {"add": "ADD", "weights": "HAS_WEIGHTS", "extra": "HAS_EXTRA", "order": "HAS_ORDER"}
FLAGS |= {"queries": "HAS_QUERIES", "valid": "HAS_VALID", "causal": "CAUSAL", "window": "WINDOW"}
FLAGS |= {"rows": "HAS_ROWS", "launch": "HAS_LAUNCH", "d_lse": "HAS_D_LSE", "ragged": "RAGGED"}
ABSENT = {"query_index_ptr": "queries", "tile_row_ptr": "rows", "launch_ptr": "launch"}
ABSENT |= {"extra_k_ptr": "extra", "extra_v_ptr": "extra", "key_order_ptr": "order"}
ABSENT |= {"log_weight_ptr": "weights", "key_valid_ptr": "valid", "d_lse_ptr": "d_lse"}


def compile_for_hopper(name: str, wanted: dict[str, str]) -> dict[str, int]:
    """Return counts of what matters in the machine code."""
    dim, tile = int(wanted.get("dim", 128)), int(wanted.get("tile", 128))
    block = int(wanted.get("block", 0))
    dtype = next((x for x in DTYPES if x in wanted), "bfloat16")
    kernel = getattr(backward, f"backward_{name}")
    constants = {flag: word in wanted for word, flag in FLAGS.items()}
    constants |= {"WIDE": False, "TILE": tile, "D": dim, "BLOCK": block}
    constants["DP"] = triton.next_power_of_2(dim)
    constants["PRECISION"] = "ieee" if dtype == "float32" else "tf32"
    constants |= {argument: None for argument, word in ABSENT.items() if word not in wanted}
    if block:
        constants["start_ptr"] = None
    if name == "queries" and "add" not in wanted:
        constants |= {"d_k_ptr": None, "d_v_ptr": None}
    if name == "queries":
        options = launch.queries_configuration(tile, dim, getattr(torch, dtype))
    else:
        options = launch.keys_configuration(block, tile, dim, getattr(torch, dtype))
    options |= {o: int(wanted[o]) for o in ("M", "N", "num_warps", "num_stages") if o in wanted}
    constants |= {size: options.pop(size) for size in ("M", "N")}
    constants |= {
        argument: int(wanted[argument]) for argument in kernel.arg_names if argument in wanted
    }
    signature, values, hints = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            values[place,] = constants[argument]
        elif argument.endswith("_ptr"):
            same = argument.removesuffix("_ptr") in OF_DTYPE
            same |= name == "keys" and argument in ("d_k_ptr", "d_v_ptr")
            summed = "*fp32" if argument in ("d_k_ptr", "d_v_ptr") else "*i32"
            signature[argument] = DTYPES[dtype] if same else TYPES.get(argument, summed)
            hints[place,] = [["tt.divisibility", 16]]
        else:
            signature[argument] = TYPES.get(argument, "i32")
            if re.fullmatch(r"([qkv]|extra|d_out)_[bhn]", argument):
                hints[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, hints)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": True, **options},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tool), "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        info = [str(tool.with_name("cuobjdump")), "-res-usage", file.name]
        use = subprocess.run(info, capture_output=True, text=True, check=True).stdout
    lines = code.splitlines()
    registers = re.search(r"REG:(\d+)", use)
    return {
        "products": sum("HGMMA" in line for line in lines),
        "slow_products": sum(bool(re.search(r"\bHMMA", line)) for line in lines),
        "copies": sum("LDGSTS" in line and ".128" in line for line in lines),
        "sums": sum(bool(re.search(r"\bREDG?\.", line)) for line in lines),
        "spills": sum(" STL" in line or " LDL" in line for line in lines),
        "registers": int(registers[1]) if registers else -1,
        "threads": 32 * options["num_warps"],
        "shared": made.metadata.shared,
        "instructions": sum(bool(re.search(r"/\*[0-9a-f]{4,5}\*/", line)) for line in lines),
    }


if __name__ == "__main__":
    for text in sys.argv[1:]:
        name, *words = text.split()
        given = dict(word.split("=") if "=" in word else (word, "") for word in words)
        print(json.dumps(compile_for_hopper(name, given)))
