"""Compile kernels of the planning for compute capability 9.0 and print what came of each; no GPU.

python tests/core/compile_planning.py KERNEL ..., each a name and words for its features:

"mass [tile=128] [float16] [causal] [padded] [dim=64]"  "attend [values] [causal] [padded]"  top
pddp-shift  pddp-moments  pddp-axis  pddp-project  pddp-gather  pddp-part  "pddp-split [most=256]"
wave-mark  wave-count  wave-start  wave-multiply  wave-transpose  wave-place  wave-arrange
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gossamer.group.gpu import pddp, ranks
from gossamer.order.gpu import wavealign
from gossamer.select.gpu import mass, top_keys

Wanted = dict[str, str]
ROWS = {"BLOCK": ranks.BLOCK, "SAMPLE": ranks.SAMPLE, "CAPACITY": ranks.CAPACITY}
TYPES = {
    "lse_ptr": "*fp32",
    "mass_ptr": "*fp32",
    "out_ptr": "*fp32",
    "score_ptr": "*fp32",
    "shift_ptr": "*fp32",
    "moment_ptr": "*fp32",
    "sum_ptr": "*fp32",
    "axis_ptr": "*fp32",
    "offset_ptr": "*fp32",
    "along_ptr": "*fp32",
    "range_ptr": "*fp32",
    "parent_ptr": "*fp32",
    "whole_ptr": "*fp32",
    "histogram_ptr": "*i32",
    "member_ptr": "*i32",
    "number_ptr": "*i32",
    "above_ptr": "*i32",
    "start_ptr": "*fp32",
    "right_ptr": "*fp32",
    "product_ptr": "*fp32",
    "point_ptr": "*fp32",
    "angle_ptr": "*fp32",
    "tile_ptr": "*i32",
    "row_ptr": "*i32",
    "begin_ptr": "*i64",
    "by_ptr": "*i64",
    "key_ptr": "*i64",
    "mask_ptr": "*u8",
    "valid_ptr": "*u8",
    "batch_ptr": "*i64",
    "head_ptr": "*i64",
    "query_ptr": "*i64",
    "count_ptr": "*i64",
    "index_ptr": "*i32",
    "scratch_ptr": "*i32",
    "order_ptr": "*i32",
    "into_ptr": "*i32",
    "tokens_ptr": "*i32",
    "scale": "fp32",
}


def mass_kernel(wanted: Wanted) -> tuple[object, dict[str, object], dict[str, int]]:
    dim, tile = int(wanted.get("dim", 128)), int(wanted.get("tile", 128))
    options = mass.mass_configuration(tile, dim, torch.bfloat16)
    options |= {key: int(wanted[key]) for key in ("N", "num_warps", "num_stages") if key in wanted}
    constants = {
        "TILE": tile,
        "M": max(16, triton.next_power_of_2(tile)),
        "D": dim,
        "DP": triton.next_power_of_2(dim),
        "N": options.pop("N"),
        "WIDE": False,
        "CAUSAL": "causal" in wanted,
        "PRECISION": "tf32",
    }
    if "padded" not in wanted:
        constants["valid_ptr"] = None
    return mass._sum_mass, constants, options


def attend_kernel(wanted: Wanted) -> tuple[object, dict[str, object], dict[str, int]]:
    dim = int(wanted.get("dim", 128))
    options = mass.attend_configuration(dim, torch.bfloat16, has_values="values" in wanted)
    options |= {key: int(wanted[key]) for key in ("N", "num_warps", "num_stages") if key in wanted}
    constants = {
        "M": mass._ROWS,
        "D": dim,
        "DP": triton.next_power_of_2(dim),
        "N": options.pop("N"),
        "WIDE": False,
        "SQUARE": True,
        "CAUSAL": "causal" in wanted,
        "PRECISION": "tf32",
    }
    constants |= {"valid_ptr": None} if "padded" not in wanted else {}
    constants |= {"v_ptr": None, "out_ptr": None} if "values" not in wanted else {}
    return mass._attend, constants, options


def top_kernel(wanted: Wanted) -> tuple[object, dict[str, object], dict[str, int]]:
    return top_keys._list_top, ROWS, {"num_warps": top_keys._WARPS}


def pddp_kernel(name: str) -> Callable[..., tuple[object, dict[str, object], dict[str, int]]]:
    def make(wanted: Wanted) -> tuple[object, dict[str, object], dict[str, int]]:
        kernel, constants = pddp.configuration(
            name,
            int(wanted.get("dim", 128)),
            torch.bfloat16,
            most=int(wanted.get("most", 4096)),
        )
        names = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        options = {key: constants.pop(key) for key in names if key in constants}
        options |= {key: int(wanted[key]) for key in options if key in wanted}
        return kernel, constants, options

    return make


def wave_kernel(name: str) -> Callable[..., tuple[object, dict[str, object], dict[str, int]]]:
    def make(wanted: Wanted) -> tuple[object, dict[str, object], dict[str, int]]:
        kernel, constants = wavealign.configuration(name)
        constants |= {key: int(wanted[key]) for key in constants if key in wanted}
        options = {key: constants.pop(key) for key in ("num_warps", "enable_fp_fusion")}
        free = {"BLOCK": 128, "DEPENDENT": 1e-5}  # what the caller chooses
        constants |= {key: free[key] for key in free if key in kernel.arg_names}
        return kernel, constants, options

    return make


KERNELS = {"mass": mass_kernel, "attend": attend_kernel, "top": top_kernel}
KERNELS |= {f"pddp-{name}": pddp_kernel(name) for name in pddp.KERNELS}
KERNELS |= {f"wave-{name}": wave_kernel(name) for name in wavealign.KERNELS}


def compile_for_hopper(name: str, wanted: Wanted) -> dict[str, int]:
    """Return counts of what matters in the machine code."""
    kernel, constants, options = KERNELS[name](wanted)
    dtype = "*fp16" if "float16" in wanted else "*bf16"
    signature, values, hints = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            values[place,] = constants[argument]
        elif argument.endswith("_ptr"):
            signature[argument] = TYPES.get(argument, dtype)
            hints[place,] = [["tt.divisibility", 16]]
        else:
            signature[argument] = TYPES.get(argument, "i32")
            # Strides of whole rows; `length` and the like are whatever they are.
            if re.fullmatch(r"[qkvx]_[bhnr]|span|padded", argument):
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
    if path := wanted.get("sass"):
        Path(path).write_text(code)
    lines = code.splitlines()
    registers = re.search(r"REG:(\d+)", use)
    return {
        "products": sum("HGMMA" in line for line in lines),
        "slow_products": sum("HMMA" in line for line in lines),
        "copies": sum("LDGSTS" in line and ".128" in line for line in lines),
        "exponentials": sum("MUFU.EX2" in line for line in lines),
        "spills": sum(" STL" in line or " LDL" in line for line in lines),
        "registers": int(registers[1]) if registers else -1,
        "shared": made.metadata.shared,
        "instructions": sum(bool(re.search(r"/\*[0-9a-f]{4,5}\*/", line)) for line in lines),
    }


if __name__ == "__main__":
    for text in sys.argv[1:]:
        name, *words = text.split()
        given = dict(word.split("=") if "=" in word else (word, "") for word in words)
        print(json.dumps(compile_for_hopper(name, given)))
