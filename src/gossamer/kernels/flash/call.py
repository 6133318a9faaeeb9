"""The calls into flash-attn-4, which is imported at the first of them."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.kernels.base import BackwardInput

TILE = 128  # queries and keys that flash-attn-4 is asked to compute together


class Library(NamedTuple):
    """What is used of flash-attn-4, and the functions that it compiles into its kernel.

    Attributes:
        forward: Its forward pass. The public functions choose tiles by themselves, 192 queries at
            head dims up to 96, which would leave a third of a tile of 128 empty, and they do not
            take output tensors.
        backward: Its backward pass. The public functions run a dense one where the lists for it are
            left out.
        block_lists: The tuple of its block-sparse tensors.
        add_log_weight: A score modification that adds `aux_tensors[0][sequence, place in list]`.
        is_visible: A mask that hides keys behind a query, positions aligned at the end.
    """

    forward: Any
    backward: Any
    block_lists: Any
    add_log_weight: Any
    is_visible: Any


@functools.cache
def library() -> Library:
    """Import flash-attn-4."""
    mods = importlib.import_module("gossamer.kernels.flash.mods")
    interface = importlib.import_module("flash_attn.cute.interface")
    return Library(
        forward=interface._flash_attn_fwd,
        backward=interface._flash_attn_bwd,
        block_lists=importlib.import_module(
            "flash_attn.cute.block_sparsity"
        ).BlockSparseTensorsTorch,
        add_log_weight=mods.add_log_weight,
        is_visible=mods.is_visible,
    )


class Sequences(NamedTuple):
    """Queries in a row, cut into sequences that each attend to a list of pages.

    Attributes:
        begin: [n + 1] int32, the first query of each sequence, and the end of the last.
        used: [n] int32, how many of its queries are computed, from the first on.
        longest: Host bound on the queries of one sequence.
        table: [n, W] int32, pages of the pool of keys; what lies behind `length` is not read.
        length: [n] int32, keys of each sequence. Of sequences with `used` 0 it does not matter.
        log_weight: [n, W] float32, natural log of each page's weight; None where all are 1. Pages
            that have one hold a single key.
    """

    begin: Tensor
    used: Tensor
    longest: int
    table: Tensor
    length: Tensor
    log_weight: Tensor | None


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, scale: float
) -> None:
    """Attend every sequence of queries to the pages that it lists.

    Args:
        q: [total, 1, D] queries.
        k: [pages, keys per page, 1, D] pool of keys.
        v: As k, the values.
        out: [total, 1, D], written where queries are computed and left alone elsewhere.
        lse: [1, total] float32, natural log, written and left alone likewise.
        sequences: Which query reads which pages.
        scale: Factor on the logits, above 0.
    """
    library_ = library()
    weighted: dict[str, Any] = {}
    if sequences.log_weight is not None:
        # A score modification sees logits that are scaled, in natural units: flash-attn-4 goes to
        # base 2 behind it.
        weighted["score_mod"] = library_.add_log_weight
        weighted["aux_tensors"] = [sequences.log_weight]
        # Which axis is the dense one is guessed otherwise, and refused for a table of one entry.
        sequences.log_weight.__leading_dim__ = 1  # pyright: ignore[reportAttributeAccessIssue]
    library_.forward(
        q,
        k,
        v,
        cu_seqlens_q=sequences.begin,
        seqused_q=sequences.used,
        seqused_k=sequences.length,
        page_table=sequences.table,
        max_seqlen_q=sequences.longest,
        **weighted,
        **_settings(q, out, lse, scale),
    )


class BlockLists(NamedTuple):
    """Blocks of 128 keys that each tile of 128 queries reads, ascending in each list.

    Attributes:
        full_count: [B|1, H|1, T] int32.
        full_index: [B|1, H|1, T, K] int32, blocks that all queries of the tile see.
        masked_count: [B|1, H|1, T] int32.
        masked_index: [B|1, H|1, T, L] int32, blocks in which a query sees what causality allows.
        causal: Whether there are masked blocks.
    """

    full_count: Tensor
    full_index: Tensor
    masked_count: Tensor
    masked_index: Tensor
    causal: bool


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: BlockLists, scale: float
) -> None:
    """Attend every tile of queries to the blocks that it lists.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        out: [B, H, N, D], written.
        lse: [B, H, N] float32, natural log, written.
        lists: Which tile reads which blocks.
        scale: Factor on the logits, above 0.
    """
    library().forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        **_sparsity(lists),
        **_settings(q, out.transpose(1, 2), lse, scale),
    )


def differentiate_blocks(
    given: BackwardInput, lists: BlockLists, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `attend_blocks`.

    Those of q are summed in no fixed order, and those of k and v where heads share them.

    Args:
        given: What the forward pass took and wrote, and the gradients of that.
        lists: Which block of keys is read by which tiles: the forward pass's lists transposed, in
            which blocks of keys and tiles of queries have changed places.
        scale: Factor on the logits, above 0.
    """
    grads = library().backward(
        *(x.transpose(1, 2) for x in (given.q, given.k, given.v, given.out, given.d_out)),
        given.lse,
        softmax_scale=scale,
        dlse=given.d_lse,
        **_sparsity(lists),
    )
    d_q, d_k, d_v = (x.transpose(1, 2) for x in grads)
    return d_q, d_k, d_v


def _sparsity(lists: BlockLists) -> dict[str, Any]:
    """Return lists and mask as flash-attn-4 takes them, in both passes."""
    library_ = library()
    tensors = library_.block_lists(
        # Both pairs are given: without counts of full blocks flash-attn-4 compiles another kernel.
        mask_block_cnt=lists.masked_count,
        mask_block_idx=lists.masked_index,
        full_block_cnt=lists.full_count,
        full_block_idx=lists.full_index,
        # Without it flash-attn-4 guesses the size from the number of lists.
        block_size=(TILE, TILE),
    )
    # The mask runs on the masked list only. `causal=True` instead would mask nothing there is: on
    # full blocks, causality is applied to the first of a list and forgotten on all others.
    mask = {"mask_mod": library_.is_visible} if lists.causal else {}
    return {"block_sparse_tensors": tensors, **mask}


def _settings(q: Tensor, out: Tensor, lse: Tensor, scale: float) -> dict[str, Any]:
    """Return what all calls have in common."""
    return {
        "softmax_scale": scale,
        "tile_mn": (TILE, TILE),
        # As flash-attn-4 chooses for these head dims where it chooses this tile.
        "mma_pv_is_rs": not 64 < q.shape[-1] <= 96,
        "intra_wg_overlap": True,
        # Heads of one KV head in one tile would need lists that they share.
        "pack_gqa": False,
        "out": out,
        "lse": lse,
    }
