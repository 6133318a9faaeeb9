"""Lloyd's algorithm on a GPU; `group.kmeans.kmeans` is its entry.

One iteration is eight launches (`lloyd.py`, `bucket.py`) and a fill: centroids are rounded to the
tokens' type, every token is labelled, tokens are sorted by label, each cluster's are added up. With
G heads, N tokens and C clusters the labels cost 2 G N C D operations on tensor cores and one read
of the tokens; the sums another read. The sort moves 40 bytes a token and, five times, a table of
4 G N C / 512 bytes. Summing by a product with one-hot labels would cost the 2 G N C D again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 512  # tokens ranked by one program
_RANKED = 32  # of them at once, each compared with all others: one to a thread of a warp
_PIECE = 64  # tokens added up by one program
_ROWS = 16  # centroids rounded by one program
_FOLD = 8  # centroid columns that one thread quad of a tensor-core product holds
_MIN_DOT = 16  # the least side of a matrix product on tensor cores
_MAX_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(x: Tensor) -> bool:
    """Return whether the kernels run on tokens of this type and size, [B, H, N, D]."""
    # Triton's interpreter, which takes CPU tensors, multiplies the bits of bfloat16 as integers.
    known = x.dtype in _DTYPES and (x.is_cuda or x.dtype != torch.bfloat16)
    return known and x.numel() > 0 and x.shape[3] <= _MAX_DIM


def lloyd(
    x: Tensor,
    init: Tensor,
    *,
    valid: Tensor | None,
    active: Tensor | None,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Lloyd's algorithm without waiting for the device.

    Args:
        x: [B, H, N, D] tokens: bfloat16, float16 or float32, D at most 256.
        init: [B, H, C, D] float32 centroids to start from.
        valid: [B, N] bool, tokens that count; None for all.
        active: [B] int64, clusters in use per batch row; None for all.
        iterations: Assignments, at least 1.
        tolerance: A head whose centroids all move less than this stops there.

    Returns:
        Centroids [B, H, C, D] float32, labels [B, H, N] int64 and sizes [B, H, C] int64, as
        `Clusters` has them. Scores are float32 sums of products of the tokens with c - o, rounded
        to the tokens' type (float32: three TF32 products), where o is the centroid nearest to zero.
        A label is thus the nearest of centroids that are moved by |c - o| times the unit roundoff
        of that type at most, as the tokens themselves were when they were rounded.
    """
    from gossamer.group.gpu import lloyd as kernels

    if x.stride(3) != 1:
        x = x.contiguous()
    batch, heads, length, dim = x.shape
    groups, num_clusters = batch * heads, init.shape[2]
    padded_dim = max(_MIN_DOT, _power_of_2(dim))
    config = _configuration(padded_dim, x)
    step = config["N"]
    padded = -(-num_clusters // step) * step
    init = init.float().contiguous()
    centroids = torch.empty_like(init)
    labels = torch.empty(x.shape[:3], dtype=torch.int64, device=x.device)
    frozen = torch.zeros(iterations + 1, groups, dtype=torch.int32, device=x.device)
    norm = init.square().sum(-1)
    shift = torch.empty_like(norm)
    shifted = x.new_empty(groups, padded, padded_dim)
    bias = norm.new_empty(groups, padded)
    active = None if active is None else active.contiguous()
    mask = None if valid is None else valid.contiguous().view(torch.uint8)
    pieces = _Pieces(labels, num_clusters, frozen, mask)
    sums = norm.new_empty(groups, pieces.bound, padded_dim)
    prepare, assign, add, finish = _kernels(kernels, "prepare", "assign", "add", "finish")
    strides, dims = x.stride()[:3], {"D": dim, "DP": padded_dim}
    half = x.dtype == torch.float16
    with torch.cuda.device_of(x):  # Triton launches on the current device; a CPU has none
        for i in range(iterations):
            old = init if i == 0 else centroids
            prepare[(padded // _ROWS, groups)](
                *(old, norm, shift, active, shifted, bias, frozen),
                *(heads, num_clusters, padded, i, float(tolerance)),
                ROWS=_ROWS,
                CLUSTERS=1024,
                LIMIT=65504.0 if half else 0.0,
                **dims,
                **_options(4),
            )
            assign[(-(-length // config["M"]), groups)](
                *(x, shifted, bias, mask, labels, frozen),
                *(*strides, length, heads, length, padded, i),
                FOLD=_FOLD,
                PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
                enable_fp_fusion=True,  # the default changes with Triton 3.10
                **dims,
                **config,
            )
            pieces.sort(i)
            add[(pieces.bound, groups)](
                *(x, pieces.order, pieces.piece, pieces.first, sums, frozen),
                *(*strides, heads, length, num_clusters, pieces.bound, i),
                PIECE=_PIECE,
                **dims,
                **_options(4 if padded_dim <= 128 else 8),
            )
            finish[(num_clusters, groups)](
                *(sums, pieces.first, pieces.sizes, old, centroids, norm, shift, frozen),
                *(pieces.bound, i),
                PIECES=8,
                **dims,
                **_options(1),
            )
    return centroids, labels, pieces.sizes.view(batch, heads, num_clusters)


class _Pieces:
    """Tokens sorted by label and cut into pieces of one label; buffers for all iterations.

    Attributes:
        bound: Pieces per head at most, known without reading the labels.
        order: [G, N] int32, tokens by (label, index); padding last.
        piece: [G, bound, 2] int32, where each piece begins in `order`, and how many tokens it has.
        first: [G, C + 1] int32, each label's first piece; behind them the number of pieces.
        sizes: [G, C] int64, tokens of each label.
    """

    def __init__(
        self, labels: Tensor, num_labels: int, frozen: Tensor, valid: Tensor | None
    ) -> None:
        self._labels, self._frozen, self._valid = labels, frozen, valid
        self._heads, length = labels.shape[1:]
        groups, device = frozen.shape[1], labels.device
        # Each label with tokens adds less than one piece to N / _PIECE.
        self.bound = length // _PIECE + min(num_labels, length)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(groups, *shape, dtype=dtype, device=device)

        self.order, self._rank = buffer(length), buffer(length)
        self.piece = buffer(self.bound, 2)
        self.first, self._start = buffer(num_labels + 1), buffer(num_labels + 1)
        self.sizes = buffer(num_labels, dtype=torch.int64)
        self._count = buffer(-(-length // _CHUNK), num_labels + 1)

    def sort(self, iteration: int) -> None:
        """Sort the labels as they are now, but for heads whose labels cannot have changed."""
        from gossamer.group.gpu import bucket

        names = ("rank", "sum_chunks", "begin", "place")
        rank, sum_chunks, begin, place = _kernels(bucket, *names)
        groups, num_chunks, _ = self._count.shape
        length, num_labels = self.order.shape[1], self.sizes.shape[1]
        self._count.zero_()
        rank[(num_chunks, groups)](
            *(self._labels, self._valid, self._rank, self._count, self._frozen),
            *(length, self._heads, length, num_labels, iteration),
            CHUNK=_CHUNK,
            STEP=_RANKED,
            **_options(1),
        )
        sum_chunks[(num_labels // 32 + 1, groups)](
            *(self._count, self.sizes, self._frozen),
            *(num_chunks, num_labels, iteration),
            CHUNKS=32,
            LABELS=32,
            **_options(4),
        )
        begin[(1, groups)](
            *(self.sizes, self._start, self.first, self._frozen),
            *(num_labels, iteration),
            PIECE=_PIECE,
            LABELS=1024,
            **_options(4),
        )
        place[(num_chunks, groups)](
            *(self._labels, self._valid, self._rank, self._count),
            *(self.sizes, self._start, self.first, self.order, self.piece, self._frozen),
            *(length, self._heads, length, num_labels, self.bound, iteration),
            CHUNK=_CHUNK,
            PIECE=_PIECE,
            **_options(4),
        )


def _configuration(padded_dim: int, x: Tensor) -> dict[str, int]:
    """Return tokens per program, centroids per step, warps and stages of `assign`.

    Every program reads all centroids from L2, 1 / M bytes per operation: at 700 TFLOP/s 128
    tokens would need 5.5 TB/s, 256 half of it. Two programs share an SM, so that one multiplies
    while the other compares: 64 centroids a step leave them 128 registers a thread, and at D = 128
    96 KiB of shared memory each.
    """
    wide = padded_dim > 128
    if x.is_cuda and not _is_tuned(x.device):
        return {"M": 16 if wide else 32, "N": 16, "num_warps": 4, "num_stages": 1}
    if x.dtype == torch.float32:
        return {"M": 64, "N": 16 if wide else 32, "num_warps": 4, "num_stages": 2}
    return {"M": 128 if wide else 256, "N": 32 if wide else 64, "num_warps": 8, "num_stages": 2}


def _is_tuned(device: torch.device) -> bool:
    """Return whether this is a data-centre GPU of NVIDIA's, Hopper or newer; others hold less."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _options(num_warps: int) -> dict[str, Any]:
    return {"num_warps": num_warps, "enable_fp_fusion": True}


def _kernels(module: object, *names: str) -> list[Any]:
    """Return kernels of a module; Triton's types do not know that they take a grid."""
    return [getattr(module, name) for name in names]


def _power_of_2(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
