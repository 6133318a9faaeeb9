"""Compile the kernels of selection by clusters for compute capability 9.0; needs no GPU.

python tests/core/compile_select.py decide | take | list

Prints, for each kernel, its instructions and how many of them spill a register.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gossamer.select.gpu import clustered, decide, listing

POINTERS = {
    "*i32": ("at_place_ptr", "word_ptr", "bits_ptr", "index_ptr", "count_ptr"),
    "*i16": ("of_key_ptr",),
    "*fp32": ("score_ptr", "log_weight_ptr", "weight_ptr"),
    "*fp64": ("log_size_ptr", "phase_ptr", "begins_ptr", "pi_ptr", "log_pi_ptr", "offset_ptr"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}


def compile_for_hopper(kernel: object, **constants: object) -> dict[str, int]:
    """Return what the machine code holds; pointers that are not named above are to int64."""
    options = {"enable_fp_fusion": True, "num_warps": constants.pop("num_warps", 4)}
    types = TYPES | dict(constants.pop("types", {}))
    signature, values, hints = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[place,] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = types.get(name, "*i64")
            hints[place,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(kernel, signature, values, hints)
    cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in code.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]
    return {"instructions": len(lines), "spills": sum(" STL" in line for line in lines)}


def compiled(part: str) -> dict[str, dict[str, int]]:
    """Return what the machine code of each kernel of a part holds."""
    numbers = (20, 500, 1000, 2000, 2363)
    out = {}
    if part == "decide":
        for number in numbers:
            for uniform in (False, True):
                room = clustered._registers(number, uniform=uniform)
                name = f"decide {room['C']} uniform={uniform}"
                out[name] = compile_for_hopper(decide.decide, UNIFORM=uniform, **room)
        layout = {"CERTAIN": -1e-9, "BLOCK": 512, "types": {"begin_ptr": "*fp64"}}
        out["lay_out"] = compile_for_hopper(decide.lay_out, **layout)
        out["phases"] = compile_for_hopper(decide.phases, BLOCK=128)
    elif part == "take":
        for room in map(clustered._registers, numbers):
            for crossing in ("exclude", "include", "cut"):
                for kind in ("*fp32", "*fp64"):
                    out[f"take {room['C']} {crossing} {kind}"] = compile_for_hopper(
                        decide.take, CROSSING=crossing, types={"score_ptr": kind}, **room
                    )
    else:
        mark, emit = clustered._MARK, clustered._EMIT
        out["mark sampled"] = compile_for_hopper(listing.mark, taken_ptr=None, SAMPLED=True, **mark)
        no_tables = dict.fromkeys(("begins_ptr", "pi_ptr"))
        out["mark taken"] = compile_for_hopper(listing.mark, SAMPLED=False, **no_tables, **mark)
        out["turn"] = compile_for_hopper(listing.turn, **clustered._TURN)
        out["name"] = compile_for_hopper(listing.name, BLOCK=256)
        out["emit"] = compile_for_hopper(listing.emit, WEIGHTS=True, SLACK=True, **emit)
        no_weights = dict.fromkeys(("of_key_ptr", "log_weight_ptr", "weight_ptr"))
        for slack in (False, True):
            out[f"emit slack={slack}"] = compile_for_hopper(
                listing.emit, WEIGHTS=False, SLACK=slack, **no_weights, **emit
            )
        tables = {"BLOCK": 512, "types": {"begin_ptr": "*fp64"}}
        out["tables_of_draws"] = compile_for_hopper(decide.tables_of_draws, **tables)
    return out


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1])))
