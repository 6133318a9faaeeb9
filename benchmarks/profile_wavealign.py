r"""Run attention once for each launch order of the clustered cases, for a profiler to look at.

ncu --profile-from-start off -k regex:forward --csv --metrics gpu__time_duration.sum,\
dram__bytes_read.sum,lts__t_sector_hit_rate.pct,lts__t_sectors_op_read.sum \
python benchmarks/profile_wavealign.py

Prints the order of the launches to stderr; `benchmarks/results/wavealign-ncu-h200.json` has a run.
"""

import sys

import torch

import gossamer as gs
from gossamer.evaluation.bench.cases import CASES
from gossamer.evaluation.bench.clustered_masks import ClusteredMasks


def main() -> None:
    """Profile all stages of all cases of clustered masks."""
    device = torch.device("cuda")
    runtime = torch.cuda.cudart()
    for case in CASES:
        if not isinstance(case, ClusteredMasks):
            continue
        q, k, v = case.tensors(device)
        for stage in case.stages((), (q, k, v), device):
            gs.attend(q, k, v, stage.plan, kernel="hopper")  # compiles where it has to
            torch.cuda.synchronize()
            print(case.name, stage.name, file=sys.stderr)
            runtime.cudaProfilerStart()
            gs.attend(q, k, v, stage.plan, kernel="hopper")
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()


if __name__ == "__main__":
    main()
