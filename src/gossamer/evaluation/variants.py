"""What a comparison compares: `svg2@.15`, `instagen-uniform@.3` or a recipe file, by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gossamer as gs
from gossamer.schedule import Schedule

# Variants of one method that are reported under names of their own.
NAMED_VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "instagen-importance": ("instagen", {"sampler": "importance"}),
    "instagen-uniform": ("instagen", {"sampler": "uniform"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One recipe of a comparison.

    Attributes:
        name: What tables and files call it, e.g. "svg2" or "instagen-uniform".
        recipe: How attention runs.
        density_asked: The density the method was asked for; None where it was given other budgets.
    """

    name: str
    recipe: gs.Recipe
    density_asked: float | None = None

    @property
    def label(self) -> str:
        """Return the name with its density, which tells two densities of one method apart."""
        if self.density_asked is None or self.name == "dense":
            return self.name
        return f"{self.name}@{self.density_asked:g}"


DENSE = "dense"


def dense_variant() -> Variant:
    """Return full attention, measured through the same path as every sparse method."""
    return Variant(name=DENSE, recipe=gs.Recipe(method=gs.get_method(DENSE)), density_asked=1.0)


def parse_variant(
    spec: str,
    *,
    dense_steps: Schedule = 0,
    dense_layers: Schedule = 0,
    kernel: str = "auto",
) -> Variant:
    """Read a method with an optional density, as the command line writes it.

    Args:
        spec: "NAME" or "NAME@DENSITY": "dense", "svg2@.15", "instagen-uniform@.3".
        dense_steps: Steps with full attention, as in a recipe.
        dense_layers: Layers with full attention, as in a recipe.
        kernel: The kernel of the recipe.

    Returns:
        The variant, named NAME.

    Raises:
        ValueError: The name is unknown (the message gives the nearest), or the density is not a
            number above 0 and at most 1.
    """
    name, separator, text = spec.strip().partition("@")
    method_name, parameters = NAMED_VARIANTS.get(name, (name, {}))
    if method_name not in gs.list_methods():
        raise ValueError(unknown_name("method", name, [*gs.list_methods(), *NAMED_VARIANTS]))
    density = _parse_density(spec, text) if separator else None
    if method_name == DENSE:
        if density not in (None, 1.0):
            raise ValueError(f"{spec!r}: dense attention has density 1; leave the @{text} out")
        return dense_variant()
    if density is not None:
        parameters = {**parameters, "density": density}
    recipe = gs.Recipe(
        method=gs.get_method(method_name, **parameters),
        dense_steps=dense_steps,
        dense_layers=dense_layers,
        kernel=kernel,
    )
    return Variant(name=name, recipe=recipe, density_asked=density)


def load_variant(recipe: str) -> Variant:
    """Load a shipped recipe by name, or a recipe file by path.

    Returns:
        The variant, named after the recipe or the file's stem.

    Raises:
        RecipeError: There is no such recipe, it is unreadable, or it holds unknown keys.
    """
    loaded = gs.Recipe.load(recipe)
    density = loaded.method.params().get("density")
    return Variant(
        name=recipe if recipe in gs.list_recipes() else Path(recipe).stem,
        recipe=loaded,
        density_asked=density if isinstance(density, float) else None,
    )


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Word the complaint about an unknown name, with the nearest known one or all of them."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def _parse_density(spec: str, text: str) -> float:
    """Return the number after the @, or say what is wrong with it."""
    try:
        density = float(text)
    except ValueError:
        density = math.nan
    if not 0.0 < density <= 1.0:
        raise ValueError(f"{spec!r}: the density after @ must be above 0 and at most 1")
    return density
