"""Fast PDDP: tokens ordered so that each run of `tile` of them points the same way."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gossamer.counter import uniform
from gossamer.group.gpu.available import runs_triton

_CHUNK_BYTES = 128 << 20  # of the float32 tokens of the heads that are ordered together
_GPU_ROWS = 128  # heads of all batch rows ordered together on a GPU: 2.5 MB of moments each
_SALT = 3  # of the start of the power iteration; apart from the salts of the clusterings
_FLAT = 1e-6  # spread over size below which a group is one point: float32 rounding is of this size


def pddp(x: Tensor, *, tile: int = 128, valid: Tensor | None = None, iterations: int = 8) -> Tensor:
    """Order tokens by principal-direction divisive partitioning into tiles of equal size.

    A group of n tokens that fills m = ceil(n / tile) tiles is sorted by projection on its principal
    direction and cut behind ceil(m / 2) tiles, level by level, until every group is one tile
    (MC-Sparse, "Fast PDDP"). Cuts are multiples of the tile, so there are exactly ceil(N / tile)
    tiles and only the last one is short. Groups of equal tokens keep their order.

    Args:
        x: [B, H, N, D] tokens, any floating dtype; sums and projections are float32.
        tile: Tokens per tile.
        valid: [B, N] bool, tokens that count; None for all. The valid tokens of a batch row are
            partitioned as if there were no others, which stand last, in their own order.
        iterations: Power iterations per level; each reads the tokens twice, no covariance is made.

    Returns:
        [B, H, N] int64, a permutation of the tokens: tile t is entries t * tile … (t + 1) * tile.

    On a GPU kernels do the same with second moments (`group/gpu/pddp.py`): tiles hold the same
    tokens up to rounding, in their own order instead of along the last direction.
    """
    batch, heads, length, dim = x.shape
    if runs_triton(x) and length:
        from gossamer.group.gpu import pddp as module

        if module.takes(x):
            return _order_by_kernels(x, valid, tile, iterations)
    num_tiles = -(-length // tile)
    row = torch.arange(batch * heads, device=x.device)
    chunk = max(1, _CHUNK_BYTES // max(4 * num_tiles * tile * dim, 1))
    order = [
        _order(
            x[part // heads, part % heads],
            None if valid is None else valid[part // heads],
            tile,
            iterations,
        )
        for part in row.split(chunk)
    ]
    return torch.cat(order).view(batch, heads, length)


def _order(x: Tensor, valid: Tensor | None, tile: int, iterations: int) -> Tensor:
    """Return the order of tokens x [R, N, D] with `valid` [R, N] or None: [R, N] int64."""
    rows, length, dim = x.shape
    device = x.device
    num_tiles = -(-length // tile)
    place = torch.arange(num_tiles * tile, device=device)
    if valid is None:
        tokens = torch.full((rows, 1), length, device=device)
        order = place.clamp(max=length - 1).expand(rows, -1)
    else:
        tokens = valid.sum(-1, keepdim=True)
        order = torch.argsort((~valid).byte(), dim=-1, stable=True)
        order = order[:, place.clamp(max=length - 1)]
    line = torch.arange(rows, device=device)[:, None]
    counted = place < tokens  # [R, P]; tokens that do not count never leave their places
    x = x[line, order].float().masked_fill_(~counted[..., None], 0.0)
    mean = x.sum(1, keepdim=True) / tokens.clamp(min=1)[..., None]
    x = (x - mean).masked_fill_(~counted[..., None], 0.0)  # [R, P, D], around 0: sums round less
    size = mean.square().sum(-1)  # [R, 1]

    tiles = -(-tokens // tile)  # [R, 1]
    number = torch.arange(num_tiles, device=device)
    # Every tile knows the group that holds it, as the tiles first … stop - 1.
    first = torch.where(number < tiles, 0, number)
    stop = torch.where(number < tiles, tiles, number + 1)
    for _ in range((num_tiles - 1).bit_length()):
        tree = _Groups(x.view(rows, num_tiles, tile, dim), counted, first, stop)
        along = tree.project(size, iterations)  # [R, T, tile]
        along = along.masked_fill((stop - first == 1)[..., None], 0.0).flatten(1)
        along = along.masked_fill(~counted, torch.inf)
        group = first.repeat_interleave(tile, dim=1)
        by = torch.argsort((group << 32) + _as_integer(along), dim=-1, stable=True)
        order, x = order.gather(1, by), x[line, by]
        middle = first + (stop - first + 1) // 2
        is_left = number < middle
        first = torch.where(is_left, first, middle)
        stop = torch.where(is_left, middle, stop)
    return order[:, :length]


def _order_by_kernels(x: Tensor, valid: Tensor | None, tile: int, iterations: int) -> Tensor:
    """Return what `pddp` does, by the kernels for a GPU."""
    from gossamer.group.gpu import pddp as module

    batch, heads, length, dim = x.shape
    place = torch.arange(-(-length // tile) * tile, device=x.device).clamp(max=length - 1)
    if valid is None:
        tokens = torch.full((batch,), length, dtype=torch.int32, device=x.device)
        order = place.int().expand(batch, -1)
    else:
        tokens = valid.sum(-1).int()
        order = torch.argsort((~valid).byte(), dim=-1, stable=True)[:, place].int()
    start = _cached_start(dim, x.device)
    at_once = max(1, _GPU_ROWS // heads)
    orders = [
        module.order_tokens(
            x[begin : begin + at_once],
            order[begin : begin + at_once].repeat_interleave(heads, dim=0),
            tokens[begin : begin + at_once].repeat_interleave(heads),
            tile=tile,
            start=start,
            iterations=iterations,
        )
        for begin in range(0, batch, at_once)
    ]
    whole = orders[0] if len(orders) == 1 else torch.cat(orders)
    return whole.view(batch, heads, -1)[..., :length].long()


def _start(dim: int, device: torch.device) -> Tensor:
    """Return the direction [D] from which power iteration starts."""
    start = uniform(_SALT, torch.arange(dim, device=device), device=device).float() - 0.5
    return start / start.norm()


def _cached_start(dim: int, device: torch.device) -> Tensor:
    """Return `_start`, made once: on a GPU its hundred small launches cost more than a level.

    Not while a graph is captured: what is made then exists only where that graph is replayed.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _start(dim, device)
    return _kept_start(dim, device)


@functools.cache
def _kept_start(dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return _start(dim, device)


def _as_integer(x: Tensor) -> Tensor:
    """Map float32 to int64 of 32 bits in the same order, so that one sort takes group and value."""
    bits = (x + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


class _Groups:
    """The groups of one level: runs of tiles, whose values stand at their first tile."""

    def __init__(self, x: Tensor, counted: Tensor, first: Tensor, stop: Tensor) -> None:
        """Take tokens x [R, T, tile, D], `counted` [R, T * tile], and each tile's group [R, T]."""
        self._x = x.flatten(0, 1)  # [R * T, tile, D]
        self._counted = counted.view(*x.shape[:2], -1)  # [R, T, tile]
        self._first = first
        is_first = first == torch.arange(x.shape[1], device=x.device)
        self._length = torch.where(is_first, stop - first, 0).flatten()
        self._size = self.sum(self._counted.sum(-1, keepdim=True).float()).clamp(min=1)  # [R, T, 1]
        self._mean = self.sum(self._x.sum(1).view(*x.shape[:2], -1)) / self._size  # [R, T, D]

    def sum(self, of_tile: Tensor) -> Tensor:
        """Sum tiles' values [R, T, C] over each group: [R, T, C], 0 where no group begins.

        In a fixed order of addition, unlike index_add_ on an accelerator.
        """
        flat = of_tile.flatten(0, 1)
        total = torch.segment_reduce(flat, "sum", lengths=self._length, axis=0, unsafe=True)
        return total.view_as(of_tile)

    def of_tile(self, of_group: Tensor) -> Tensor:
        """Give every tile its group's value [R, T, C]."""
        return of_group.gather(1, self._first[..., None].expand_as(of_group))

    def along(self, direction: Tensor) -> Tensor:
        """Return the centred tokens' projections [R, T, tile] on their group's direction."""
        each = self.of_tile(direction)
        shift = (self.of_tile(self._mean) * each).sum(-1, keepdim=True)
        product = self._x @ each.flatten(0, 1)[..., None]  # [R * T, tile, 1]
        return (product.view_as(self._counted) - shift).masked_fill_(~self._counted, 0.0)

    def project(self, size: Tensor, iterations: int) -> Tensor:
        """Return projections [R, T, tile] on the principal directions; 0 in groups of one point.

        Args:
            size: [R, 1], squared length of what was subtracted from all tokens.
            iterations: Power iterations.
        """
        direction = _start(self._x.shape[-1], self._x.device).expand_as(self._mean)
        for _ in range(iterations):
            along = self.along(direction)
            product = along.flatten(0, 1)[:, None] @ self._x  # [R * T, 1, D]
            product = self.sum(product.view_as(self._mean))
            product = product - self._mean * self.sum(along.sum(-1, keepdim=True))
            direction = torch.nn.functional.normalize(product, dim=-1)
        along = self.along(direction)
        spread = self.sum(along.square().sum(-1, keepdim=True)) / self._size
        power = self.sum(self._x.square().sum((1, 2)).view(*self._first.shape, 1)) / self._size
        is_point = spread <= _FLAT**2 * (power + size[..., None])
        return along.masked_fill_(self.of_tile(is_point), 0.0)
