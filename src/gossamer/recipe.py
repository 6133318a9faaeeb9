"""Recipes: what to run and where, as one value that is also a TOML file."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from gossamer.budgets import Budgets
from gossamer.errors import PlanError, ProfileMismatchError, RecipeError, described
from gossamer.kernels import list_kernels
from gossamer.methods import Method, get_method, get_method_class
from gossamer.order import Order, get_order
from gossamer.reuse import Reuse
from gossamer.schedule import Schedule, check_schedule
from gossamer.select.profile import place_profile

# Below this many tokens planning costs more than it saves (CPU, 2 cores: dense attention of 1,024
# tokens takes 1.2 ms a head, a cold plan alone 2 ms).
MIN_TOKENS = 1024
_TABLES = ("method", "reuse", "budgets", "order")
_NONE = "none"  # for None where it is not the default: TOML has no null


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model's attention is sparsified.

    Attributes:
        method: Decides which keys are read.
        dense_steps: Denoising steps that stay dense: a count or a fraction of the first ones, a
            pair (first, last), or indices such as "0-3,38". Fractions round up.
        dense_layers: Layers that stay dense, in the same forms.
        min_tokens: Calls with fewer queries go dense, and the record says so.
        reuse: Whether plans are kept over steps and corrected by a residual; None: plan each step.
        budgets: How the method's density is shared out over steps, layers and heads; None: equally.
        order: In which order tiles are launched, such as `WaveAlign()`; None: as planned.
        kernel: One of `list_kernels()`, or "auto".

    Raises:
        RecipeError: A value out of range, with the allowed ones.
    """

    method: Method
    dense_steps: Schedule = 0
    dense_layers: Schedule = 0
    min_tokens: int = MIN_TOKENS
    reuse: Reuse | None = None
    budgets: Budgets | None = None
    order: Order | None = None
    kernel: str = "auto"

    def __post_init__(self) -> None:
        """Check every value and bring schedules to their normal form."""
        if not isinstance(self.method, Method):
            raise RecipeError(
                f"method={described(self.method)} is not a method: use gossamer.get_method(name)"
            )
        for name in ("dense_steps", "dense_layers"):
            object.__setattr__(self, name, check_schedule(name, getattr(self, name)))
        tokens = self.min_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise RecipeError(f"min_tokens={described(tokens)}: must be an integer >= 0")
        if self.reuse is not None and not isinstance(self.reuse, Reuse):
            raise RecipeError(f"reuse={described(self.reuse)}: must be gossamer.Reuse(…) or None")
        if self.budgets is not None and not isinstance(self.budgets, Budgets):
            raise RecipeError(
                f"budgets={described(self.budgets)}: must be gossamer.Budgets(…) or None"
            )
        if self.budgets is not None and self.method.params().get("density") is None:
            raise RecipeError(f"budgets share out a density, and {self.method.name} was given none")
        if self.order is not None and not isinstance(self.order, Order):
            raise RecipeError(
                f"order={described(self.order)}: must be gossamer.WaveAlign(…) or None"
            )
        if not isinstance(self.kernel, str) or self.kernel not in ["auto", *list_kernels()]:
            known = ", ".join(["auto", *list_kernels()])
            raise RecipeError(f"unknown kernel {described(self.kernel)}: known are {known}")

    def to_toml(self) -> str:
        """Return the recipe as TOML text, which `from_toml` reads back to an equal recipe."""
        lines = [
            f"{field.name} = {_toml(value)}"
            for field in fields(self)
            if field.name not in _TABLES and (value := getattr(self, field.name)) != field.default
        ]
        lines += _table("method", {"name": self.method.name, **_spelled(self.method)})
        if self.reuse is not None:
            lines += _table("reuse", self.reuse.params())
        if self.budgets is not None:
            lines += _table("budgets", self.budgets.params())
        if self.order is not None:
            lines += _table("order", {"name": self.order.name, **self.order.params()})
        return "\n".join(lines).lstrip("\n") + "\n"

    @classmethod
    def from_toml(cls, text: str, *, folder: str | os.PathLike[str] = "") -> Recipe:
        """Read a recipe from TOML text.

        Args:
            text: The TOML text.
            folder: Where relative paths of profiles start; "" for the current directory.

        Raises:
            RecipeError: Not TOML, an unknown key, a value that is not allowed, or no such profile.
            ProfileMismatchError: A profile is no profile, or does not fit the method.
        """
        if not isinstance(text, str):
            raise RecipeError(f"text={described(text)}: must be TOML text (load reads a file)")
        try:
            return cls.from_dict(tomllib.loads(text), folder=folder)
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"not valid TOML: {error}{_bare_point(text, str(error))}") from error

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], *, folder: str | os.PathLike[str] = "") -> Recipe:
        """Build a recipe from its TOML table.

        Args:
            table: The table.
            folder: Where relative paths of profiles start; "" for the current directory.

        Raises:
            RecipeError: An unknown key, a value that is not allowed, or no such profile.
            ProfileMismatchError: A profile is no profile, or does not fit the method.
        """
        if not isinstance(table, Mapping):
            raise RecipeError(f"a recipe's table is {described(table)}: must be a dict")
        table = dict(table)
        _check_keys("", table, [field.name for field in fields(cls)])
        method = _named("method", table.pop("method", None), "instagen")
        order = table.pop("order", None)
        parts = {"reuse": Reuse, "budgets": Budgets}
        given = {key: table.pop(key) for key in parts if key in table}
        try:
            if order is not None:
                table["order"] = get_order(**_named("order", order, "wavealign"))
            for key, value in given.items():
                if not isinstance(value, dict):
                    raise RecipeError(f"{key}={described(value)}: must be a [{key}] table")
                _check_keys(f"{key}: ", value, [field.name for field in fields(parts[key])])
                placed = _placed(value, ("profile",), folder) if key == "budgets" else value
                table[key] = parts[key](**placed)
            return cls(method=get_method(**_read(method, folder)), **table)
        except (PlanError, TypeError) as error:
            raise RecipeError(str(error)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a TOML file; the file appears whole or not at all.

        Missing folders above it are made.

        Raises:
            RecipeError: The file cannot be written; the message names what is in the way.
        """
        path, text = Path(path), self.to_toml()
        scratch = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
            ) as file:
                scratch = Path(file.name)
                file.write(text)
            scratch.replace(path)
        except OSError as error:
            raise RecipeError(f"cannot write the recipe {path}: {error}") from error
        finally:
            if scratch is not None:
                scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Recipe:
        """Read a shipped recipe by name, or a recipe file by path.

        Relative paths of profiles in a file count from its folder.

        Raises:
            RecipeError: No such recipe or file, one that is not allowed, or no such profile.
            ProfileMismatchError: A profile is no profile, or does not fit the method.
        """
        if not isinstance(name_or_path, (str, os.PathLike)):
            given = described(name_or_path)
            raise RecipeError(f"recipe={given}: give a .toml file or a name of list_recipes()")
        path = Path(name_or_path)
        if str(name_or_path) in list_recipes():
            path = Path(str(files("gossamer") / "recipes" / f"{name_or_path}.toml"))
        elif not path.is_file():
            near = difflib.get_close_matches(str(name_or_path), list_recipes(), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(
                f"no recipe {str(name_or_path)!r}: {hint}give a .toml file or one of "
                + ", ".join(list_recipes())
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"cannot read the recipe {path}: {error}") from error
        try:
            return cls.from_toml(text, folder=path.absolute().parent)
        except (RecipeError, ProfileMismatchError) as error:
            raise type(error)(f"{path}: {error}") from error


def list_recipes() -> list[str]:
    """Return the names of the recipes that ship with Gossamer."""
    found = (files("gossamer") / "recipes").iterdir()
    return sorted(
        entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml")
    )


def _check_keys(where: str, table: Mapping[str, Any], allowed: list[str]) -> None:
    """Refuse a key that is not allowed.

    Raises:
        RecipeError: Naming the key and the nearest one.
    """
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(f"{where}unknown key {key!r}: {hint}known are {', '.join(allowed)}")


def _named(key: str, value: object, example: str) -> dict[str, Any]:
    """Return a table with a name, given as one or by the name alone.

    Raises:
        RecipeError: It is neither.
    """
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return value
    given = "" if value is None else f"{key}={described(value)}: "
    raise RecipeError(f'{given}a recipe needs a [{key}] table with a name, e.g. "{example}"')


def _spelled(method: Method) -> dict[str, Any]:
    """Return a method's parameters as a recipe file holds them."""
    params = method.params()
    for field in _with_none(type(method)):
        if params[field] is None:
            params[field] = _NONE
    return params


def _read(table: Mapping[str, Any], folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the method's table of a recipe file with None where it says so, paths placed.

    Raises:
        PlanError: No method has this name.
    """
    method = get_method_class(table["name"])
    fields_with_none = _with_none(method)
    params = {
        key: None if value == _NONE and key in fields_with_none else value
        for key, value in table.items()
    }
    return _placed(params, method.file_params, folder)


def _placed(
    table: Mapping[str, Any], names: Collection[str], folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Return a table whose profiles, under `names`, are found from a folder."""
    return {
        key: place_profile(value, folder)
        if key in names and isinstance(value, str) and value
        else value
        for key, value in table.items()
    }


def _bare_point(text: str, complaint: str) -> str:
    """Return the fix where TOML refuses a number that begins or ends with its point, else "".

    Args:
        text: The TOML text.
        complaint: The parser's, which says the line.
    """
    place = re.search(r"at line (\d+)", complaint)
    lines = text.splitlines()
    number = int(place[1]) if place else 0
    if not 0 < number <= len(lines):
        return ""
    # In front of a comment, and outside of strings: TOML allows neither .3 nor 3. as a number.
    line = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", lines[number - 1])
    bare = re.search(r"(?<![\w.])[+-]?(?:\.\d+|\d+\.(?![\w.]))(?!\.)", line)
    if bare is None:
        return ""
    whole = re.sub(r"^([+-]?)\.", r"\g<1>0.", bare[0])
    return f": write {bare[0]} as {whole}{'0' if whole.endswith('.') else ''}"


def _with_none(method: type[Method]) -> set[str]:
    """Return the parameters for which a file has to say None, since leaving them out does not."""
    return {
        field.name
        for field in fields(method)
        if field.default is not None and not isinstance(field.default, str)
    }


def _table(name: str, params: Mapping[str, Any]) -> list[str]:
    """Return a TOML table, without what is None."""
    given = {key: value for key, value in params.items() if value is not None}
    return ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in given.items())]


def _toml(value: object) -> str:
    """Return a plain value in TOML notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    raise RecipeError(f"a recipe file cannot hold {value!r}")
