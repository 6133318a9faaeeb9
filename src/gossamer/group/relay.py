"""Fixed groups of tokens that relay information: patches and windows of a grid, segments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.group.cubes import cubes

Shape = tuple[int, int, int]

# Patches whose densities differ by less than 6% count as equal: then the most cubic one is taken.
_DENSITY_STEPS = 16


def patch_positions(grid: Shape, patch: Shape, device: torch.device) -> Tensor:
    """Return each token's position inside its patch, 0…volume-1 in raster order: [N] int64.

    Tokens at one position form a group with one token of each patch.
    """
    tokens = cubes(grid, patch, device)
    return _label(tokens, torch.arange(tokens.shape[1], device=device), math.prod(grid))


def patch_numbers(grid: Shape, patch: Shape, device: torch.device) -> Tensor:
    """Return the number of each token's patch, in raster order of patches: [N] int64."""
    tokens = cubes(grid, patch, device)
    number = torch.arange(tokens.shape[0], device=device)[:, None]
    return _label(tokens, number, math.prod(grid))


def _label(tokens: Tensor, label: Tensor, num_tokens: int) -> Tensor:
    """Give tokens [any shape], -1 for none, their labels; `label` broadcasts to them."""
    place = torch.where(tokens < 0, num_tokens, tokens).flatten()
    labels = torch.empty(num_tokens + 1, dtype=torch.int64, device=tokens.device)
    return labels.scatter_(0, place, label.expand_as(tokens).flatten())[:num_tokens]


def patch_windows(grid: Shape, patch: Shape, window: Shape, device: torch.device) -> Tensor:
    """Return the tokens of the window around each patch.

    A window is centred on its patch, one token more behind it where the difference is odd, and
    shifted inward at the borders, so that all windows are whole and hold their patch.

    Args:
        grid: (frames, rows, columns) of the tokens.
        patch: Sides of a patch, none longer than the window's.
        window: Sides of a window, none longer than the grid's.
        device: Where the result lies.

    Returns:
        [num_patches, volume of the window] int32 token indices, ascending; patches in raster order.
    """
    sides = zip(grid, patch, window, strict=True)
    frame, row, column = (_axis_windows(*side, device) for side in sides)
    line = frame[:, None, :, None] * grid[1] + row[None, :, None]  # [f, r, window f, window r]
    token = line[:, :, None, :, :, None] * grid[2] + column[None, None, :, None, None]
    return token.reshape(-1, math.prod(window))


def _axis_windows(size: int, patch: int, window: int, device: torch.device) -> Tensor:
    """Return the places of each patch's window along one axis, [patches, window] int32."""
    first = torch.arange(0, size, patch, dtype=torch.int32, device=device)
    first = (first - (window - patch) // 2).clamp(0, size - window)
    return first[:, None] + torch.arange(window, dtype=torch.int32, device=device)


def segment_groups(position: Tensor, groups: int, num_tokens: int) -> Tensor:
    """Return the group of each position: contiguous segments, dealt to the groups in turn.

    Segments hold `groups` tokens. A sequence of fewer than `groups` such segments is cut into
    `groups` shorter ones, so that the groups' sizes stay near num_tokens / groups.
    """
    length = min(groups, -(-num_tokens // groups))
    return position // max(length, 1) % groups


def cyclic_groups(position: Tensor, groups: int) -> Tensor:
    """Return the group of each position: token r of neighbourhood t goes to group (t + r)."""
    return (position // groups + position) % groups


def partition_density(size: int, parts: int) -> float:
    """Return the share of pairs inside one part, of `size` places dealt to `parts` in turn."""
    small, larger = divmod(size, parts)
    return (larger * (small + 1) ** 2 + (parts - larger) * small**2) / size**2


def exact_patch(grid: Shape, volume: int) -> Shape:
    """Return the most cubic patch of this volume that the grid holds.

    Where none fits, one axis reaches past the grid and some positions hold no token.
    """
    found: list[tuple[int, int, Shape]] = []
    for frames in _divisors(volume):
        for rows in _divisors(volume // frames):
            patch = (frames, rows, volume // frames // rows)
            past = sum(max(0, side - size) for side, size in zip(patch, grid, strict=True))
            found.append((past, sum(patch), patch))
    return min(found)[2]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def nearest_patch(grid: Shape, groups: int) -> Shape:
    """Return the patch whose groups hold as near to 1 / groups of the pairs as the grid allows.

    Of patches with about the same density the most cubic one stands for all, so that the density
    never rises with `groups`.
    """
    # No patch of more than 4 * groups tokens comes near: ragged borders cost at most 1.125 an axis.
    limit = 4 * groups
    best: dict[int, tuple[int, Shape, float]] = {}
    for frames in range(1, min(grid[0], limit) + 1):
        for rows in range(1, min(grid[1], limit // frames) + 1):
            for columns in range(1, min(grid[2], limit // frames // rows) + 1):
                patch = (frames, rows, columns)
                density = math.prod(map(partition_density, grid, patch))
                step = round(_DENSITY_STEPS * math.log(density))
                one = (sum(patch), patch, density)
                best[step] = min(best.get(step, one), one)
    steps = sorted(best, reverse=True)
    return min((abs(best[step][2] - 1 / groups), best[step][1]) for step in steps)[1]


def nearest_window(grid: Shape, groups: int) -> Shape:
    """Return the window that holds as near to N / groups tokens as the grid allows.

    Windows grow from one token to the grid along their shortest side: each holds the one before.
    """
    window, target = (1, 1, 1), math.prod(grid) / groups
    best = window
    while window != grid:
        open_axes = [axis for axis in range(3) if window[axis] < grid[axis]]
        axis = min(open_axes, key=lambda axis: (window[axis], -axis))
        frames, rows, columns = (side + (axis == place) for place, side in enumerate(window))
        window = (frames, rows, columns)
        if abs(math.prod(window) - target) < abs(math.prod(best) - target):
            best = window
    return best


def nearest_span(num_queries: int, num_keys: int, groups: int, *, sink: int, causal: bool) -> int:
    """Return how far a sliding window reaches so that it reads about 1 / groups of visible pairs.

    Args:
        num_queries: N; query i stands at position i + S - N.
        num_keys: S.
        groups: One over the density.
        sink: First keys that every query reads besides.
        causal: The window reaches back only, and keys behind a query are not visible.
    """
    # On the host, where reading the sums back waits for nothing.
    position = torch.arange(num_keys - num_queries, num_keys, device="cpu")
    last = (position + 1).clamp(min=0) if causal else torch.full_like(position, num_keys)

    def read(span: int) -> int:
        high = last.minimum((position + span + 1).clamp(min=0))
        low = (position - span).clamp(min=0).minimum(high)
        sinks = low.clamp(max=sink) + (last.clamp(max=sink) - high).clamp(min=0)
        return int((high - low + sinks).sum())

    target = int(last.sum()) / groups
    low, high = 0, num_keys
    while low < high:  # the smallest span that reads at least the target
        middle = (low + high) // 2
        low, high = (low, middle) if read(middle) >= target else (middle + 1, high)
    below = max(low - 1, 0)
    return below if target - read(below) < read(low) - target else low
