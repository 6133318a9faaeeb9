"""Reading calibration profiles: threshold maps, fidelity curves, and the budgets they give.

A profile is one safetensors file. Its tensors, T step buckets, L layers, H heads, R blocks:

    thresholds  [T, L, H, R, R] float16, threshold map of each head, in its own token order
    order       [L, H] uint8, index into AXIS_ORDERS: the token order of each head
    levels      [P] float64, thresholds p at which the curves were measured
    fidelity    [T, L, H, P] float32
    error       [T, L, H, P] float32

The metadata is one JSON object under the key `gossamer`.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PlanError, ProfileMismatchError
from gossamer.select.fidelity import (
    Curves,
    Solution,
    bucket_of,
    least_density,
    level_density,
    solve_fast,
    solve_uniform,
)
from gossamer.select.resize import Grid, resize_map
from gossamer.select.saliency import entry_levels

FORMAT = 1
METADATA_KEY = "gossamer"
KIND = "scaling"
FILE_NAME = "scaling.safetensors"
BUDGETS = ("fast", "uniform")
PERMUTES = ("none", "axis")
_NEAR = 0.02  # how nearly a density is met, DESIGN.md law 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """What a profile file says; its threshold maps stay on disk until they are asked for.

    Attributes:
        path: The file.
        stamp: Its modification time and size, which tell a rewritten file apart.
        model: Id of the model that it was made for.
        num_layers: L.
        num_heads: H, of the whole model.
        grid: (frames, rows, columns) of the latent tokens.
        block: Tokens per block.
        num_steps: Denoising steps of the calibration.
        num_buckets: T.
        permute: "axis" where each head has a token order of its own, else "none".
        order: [L, H] uint8, index into `AXIS_ORDERS`.
        levels: [P] float64.
        fidelity: [T, L, H, P] float64.
        error: [T, L, H, P] float64.
        metadata: Everything in the metadata, as it stands.
    """

    path: str
    stamp: tuple[int, int]
    model: str
    num_layers: int
    num_heads: int
    grid: Grid
    block: int
    num_steps: int
    num_buckets: int
    permute: str
    order: Tensor
    levels: Tensor
    fidelity: Tensor
    error: Tensor
    metadata: dict[str, Any]

    def bucket(self, step: int, num_steps: int | None) -> int:
        """Return the bucket of a step; a generation of unknown length has the profile's steps."""
        total = self.num_steps if num_steps is None else num_steps
        return bucket_of(step, total, self.num_buckets)

    def thresholds(self, bucket: int, layer: int, grid: Grid) -> Tensor:
        """Return the threshold maps of one layer's heads at a resolution, [H, R, R] float16."""
        return self.resized(self._read(bucket, layer), layer, grid)

    def _read(self, bucket: int, layer: int) -> Tensor:
        with _open(self.path) as file:
            return file.get_slice("thresholds")[bucket, layer]

    def resized(self, maps: Tensor, layer: int, grid: Grid) -> Tensor:
        """Resize the maps of one layer's heads [H, R, R] from the profile's grid to another."""
        if grid == self.grid:
            return maps
        return resize_heads(maps, self.order[layer], self.grid, grid, block=self.block)

    def curves(self, grid: Grid) -> Curves:
        """Return what each head keeps and loses at each level, at a resolution; kept in memory."""
        return _curves(self.path, self.stamp, grid)

    def check(
        self,
        *,
        model: str | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        block: int | None = None,
        permute: str | None = None,
    ) -> None:
        """Refuse a profile that was made for something else; None is not checked.

        Raises:
            ProfileMismatchError: With every value that differs, expected and actual.
        """
        wanted = {
            "model": model,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "block": block,
            "permute": permute,
        }
        differs = [
            f"expected {name}={want!r}, but the profile has {getattr(self, name)!r}"
            for name, want in wanted.items()
            if want is not None and want != getattr(self, name)
        ]
        if differs:
            raise ProfileMismatchError(
                f"{self.path}: {'; '.join(differs)}: make a profile of this model with "
                "`gossamer calibrate`"
            )

    def check_place(self, layer: int, last_head: int) -> None:
        """Refuse a layer or heads that the profile does not know.

        Args:
            layer: Index of the layer.
            last_head: Greatest global index of the heads.

        Raises:
            ProfileMismatchError: With what is asked for and what there is.
        """
        if layer >= self.num_layers or last_head >= self.num_heads:
            raise ProfileMismatchError(
                f"{self.path}: expected layer {layer} and heads up to {last_head + 1}, but the "
                f"profile has {self.num_layers} layers and {self.num_heads} heads"
            )


def resize_heads(maps: Tensor, order: Tensor, source: Grid, target: Grid, *, block: int) -> Tensor:
    """Resize the maps of several heads [..., H, R, R], each in its own token order [H]."""
    done: list[tuple[Tensor, Tensor]] = []
    for axes in order.unique().tolist():
        heads = (order == axes).nonzero().flatten()
        part = maps.index_select(-3, heads)
        done.append((heads, resize_map(part, source, target, axes=axes, block=block)))
    whole = torch.cat([part for _, part in done], dim=-3)
    return whole.index_select(-3, torch.cat([heads for heads, _ in done]).argsort())


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that ship with bundled models."""
    found = (files("gossamer") / "models").iterdir()
    return sorted(entry.name.replace("_", "-") for entry in found if (entry / FILE_NAME).is_file())


def find_profile(name_or_path: str) -> str:
    """Return the path of a shipped profile or of a profile file.

    Raises:
        PlanError: Neither is there; the message has the path tried and names the shipped ones.
    """
    if os.path.isfile(name_or_path):
        return os.path.abspath(name_or_path)
    known = shipped_profiles()
    if name_or_path in known:
        return str(files("gossamer") / "models" / name_or_path.replace("-", "_") / FILE_NAME)
    near = difflib.get_close_matches(os.path.basename(name_or_path), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PlanError(
        f"no profile {name_or_path!r}: there is no file {os.path.abspath(name_or_path)}; {hint}"
        "give a file that `gossamer calibrate` wrote"
        + (f", or one of {', '.join(known)}" if known else "")
    )


def settle_profile(name_or_path: str) -> str:
    """Return what names a profile whatever the current directory becomes, once it can be read.

    Returns:
        The name of a shipped profile as it stands, the absolute path of a file.

    Raises:
        PlanError: There is no such profile.
        ProfileMismatchError: The file is no profile, or of another format version.
    """
    path = read_profile(name_or_path).path
    return path if os.path.isfile(name_or_path) else name_or_path


def place_profile(name_or_path: str, folder: str | os.PathLike[str]) -> str:
    """Return a profile that a file in `folder` names: relative paths count from there."""
    placed = os.path.join(folder, name_or_path)
    if not os.path.isfile(placed) and name_or_path in shipped_profiles():
        return name_or_path
    return placed


def read_profile(name_or_path: str) -> Profile:
    """Read a profile's header and curves; kept in memory until the file changes.

    Raises:
        PlanError: There is no such profile.
        ProfileMismatchError: The file is no profile, or of another format version.
    """
    path = find_profile(name_or_path)
    status = os.stat(path)
    return _read(path, (status.st_mtime_ns, status.st_size))


def budgets(
    profile: Profile,
    density: float,
    grid: Grid,
    kind: str,
    orientation: str,
    *,
    floor: float = 0.0,
) -> Solution:
    """Solve for the table of budgets that meets a density at a resolution; kept in memory.

    Warns, once per file, resolution and density, where even the sparsest masks exceed the density.

    Args:
        profile: The profile.
        density: Share of the pairs of all steps, layers and heads.
        grid: (frames, rows, columns) of the running call.
        kind: One of `BUDGETS`.
        orientation: One of `ORIENTATIONS`, for "fast".
        floor: Share that every head keeps, whatever the table says.
    """
    curves = profile.curves(grid)
    _announce_least(profile.path, profile.stamp, grid, density, floor)
    if kind == "uniform":
        return _solve_uniform(curves, density)
    return _solve_fast(curves, density, orientation)


@lru_cache(maxsize=16)
def announce_resize(path: str, stamp: tuple[int, int], grid: Grid) -> None:
    """Warn, once per file and resolution, that maps are resized."""
    profile = _read(path, stamp)
    warnings.warn(
        f"{path} was made on the grid {profile.grid}, this call has {grid}: its maps are resized "
        "conservatively, its budgets solved again; calibrate at this resolution for tighter ones",
        UserWarning,
        stacklevel=2,
    )


@lru_cache(maxsize=64)
def _announce_least(
    path: str, stamp: tuple[int, int], grid: Grid, density: float, floor: float
) -> None:
    """Warn, once per file, resolution and density, that the masks are denser than was asked."""
    least = least_density(_curves(path, stamp, grid), floor)
    if density < least - _NEAR:
        warnings.warn(
            f"density={density:g} was asked for, but the sparsest masks of {path} on the grid "
            f"{grid} come to {least:.3f}, which is what runs: ask for at least that, or calibrate "
            "with smaller blocks or for this resolution",
            UserWarning,
            stacklevel=2,
        )


# The curves are the key of the caches below, and compare by identity.
@lru_cache(maxsize=16)
def _curves(path: str, stamp: tuple[int, int], grid: Grid) -> Curves:
    """Return the curves with the densities of the maps at a resolution."""
    profile = _read(path, stamp)
    num_tokens = grid[0] * grid[1] * grid[2]
    num_levels = len(profile.levels)
    density = torch.empty_like(profile.fidelity)
    for bucket in range(profile.num_buckets):
        for layer in range(profile.num_layers):
            maps = profile.thresholds(bucket, layer, grid)
            entry = entry_levels(maps, profile.levels)
            density[bucket, layer] = level_density(entry, num_levels, num_tokens, profile.block)
    return Curves(
        fidelity=profile.fidelity,
        error=profile.error,
        density=density,
        num_steps=profile.num_steps,
    )


@lru_cache(maxsize=64)
def _solve_fast(curves: Curves, density: float, orientation: str) -> Solution:
    return solve_fast(density, curves, orientation=orientation)


@lru_cache(maxsize=64)
def _solve_uniform(curves: Curves, density: float) -> Solution:
    return solve_uniform(density, curves)


@lru_cache(maxsize=8)
def _read(path: str, stamp: tuple[int, int]) -> Profile:
    """Read a file's header and curves."""
    with _open(path) as file:
        metadata = read_metadata(file, path, KIND)
        missing = {"thresholds", "order", "levels", "fidelity", "error"} - set(file.keys())
        missing |= {"grid", "block", "model", "num_steps", "permute"} - set(metadata)
        if missing:
            raise ProfileMismatchError(
                f"{path}: expected a whole profile, but it lacks {', '.join(sorted(missing))}: "
                "make it again with `gossamer calibrate`"
            )
        order, levels, fidelity, error = (
            file.get_tensor(name) for name in ("order", "levels", "fidelity", "error")
        )
        maps = tuple(file.get_slice("thresholds").get_shape())
    frames, rows, columns = _checked_grid(metadata, path)
    num_blocks = -(-frames * rows * columns // metadata["block"])
    num_layers, num_heads = order.shape if order.dim() == 2 else (0, 0)
    num_buckets, places = fidelity.shape[0] if fidelity.dim() else 0, (num_layers, num_heads)
    shapes = {
        "order": (places, tuple(order.shape)),
        "fidelity": ((num_buckets, *places, *levels.shape), tuple(fidelity.shape)),
        "error": (tuple(fidelity.shape), tuple(error.shape)),
        "thresholds": ((num_buckets, *places, num_blocks, num_blocks), maps),
    }
    for name, (expected, got) in shapes.items():
        if expected != got or 0 in got:
            raise ProfileMismatchError(f"{path}: expected {name} {expected}, got {got}")
    return Profile(
        path=path,
        stamp=stamp,
        model=metadata["model"],
        num_layers=num_layers,
        num_heads=num_heads,
        grid=(frames, rows, columns),
        block=metadata["block"],
        num_steps=metadata["num_steps"],
        num_buckets=num_buckets,
        permute=metadata["permute"],
        order=order,
        levels=levels.double(),
        fidelity=fidelity.double(),
        error=error.double(),
        metadata=metadata,
    )


def _checked_grid(metadata: dict[str, Any], path: str) -> Grid:
    """Return the grid of a profile's metadata, whose facts are checked for their types.

    Raises:
        ProfileMismatchError: Naming what is not as calibration writes it.
    """
    grid: Any = metadata["grid"]
    sizes = {name: metadata[name] for name in ("block", "num_steps")}
    if isinstance(grid, list) and len(grid) == 3:
        sizes |= {f"grid[{axis}]": size for axis, size in enumerate(grid)}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ProfileMismatchError(
                    f"{path}: expected {name} to be an integer >= 1, got {size!r}"
                )
        if metadata["permute"] not in PERMUTES:
            raise ProfileMismatchError(
                f"{path}: expected permute to be one of {PERMUTES}, got {metadata['permute']!r}"
            )
        return grid[0], grid[1], grid[2]
    raise ProfileMismatchError(f"{path}: expected grid to be three integers, got {grid!r}")


def read_metadata(file: Any, path: str, kind: str) -> dict[str, Any]:  # noqa: ANN401 -- safetensors ships no types
    """Return the metadata of an open file, checked for what kind of file it is.

    Raises:
        ProfileMismatchError: Another kind of file, or another version of the format.
    """
    text = (file.metadata() or {}).get(METADATA_KEY)
    try:
        metadata: Any = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileMismatchError(
            f"{path}: expected JSON under {METADATA_KEY!r} in the metadata, but {error}: make it "
            "again with `gossamer calibrate`"
        ) from error
    if not isinstance(metadata, dict):
        metadata = {}
    found = (metadata.get("kind"), metadata.get("format"))
    if found != (kind, FORMAT):
        raise ProfileMismatchError(
            f"{path}: expected a {kind!r} file of format {FORMAT}, got {found[0]!r} of format "
            f"{found[1]!r}: make it again with `gossamer calibrate`"
        )
    return metadata


def _open(path: str) -> Any:  # noqa: ANN401 -- safetensors ships no types
    """Open a safetensors file, importing the package only now.

    Raises:
        ProfileMismatchError: The file is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ProfileMismatchError(
            f"{Path(path)}: expected a safetensors file, but {error}"
        ) from error
