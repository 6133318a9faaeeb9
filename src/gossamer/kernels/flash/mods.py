"""Functions that flash-attn-4 compiles into its kernel; importing this needs the CuTe DSL."""

# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN001, ANN201, ARG001 -- flash-attn-4 passes these arguments by these names

import cutlass
from cutlass import cute


@cute.jit
def add_log_weight(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Add the weight of the key at its place in the list of its sequence.

    flash-attn-4 takes `kv_idx` modulo the length of the list, so no load leaves the list of a
    sequence that has one; what stands behind the end is masked afterwards.
    """
    weights = aux_tensors[0]
    row = cute.make_rmem_tensor(1, cutlass.Int32)
    place = cute.make_rmem_tensor(1, cutlass.Int32)
    row.store(batch)
    place.store(kv_idx)
    weight = cute.make_rmem_tensor(1, cutlass.Float32)
    weight[0] = weights[row[0], place[0]]
    return score + weight.load()


@cute.jit
def is_visible(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Return whether a query sees a key: kv_idx <= q_idx + S - N."""
    offset = cute.make_rmem_tensor(1, cutlass.Int32)
    offset[0] = seqlen_info.seqlen_k - seqlen_info.seqlen_q
    return kv_idx <= q_idx + offset.load()
