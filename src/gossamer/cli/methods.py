"""`gossamer methods`: every method with its parameters, defaults and paper."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

import gossamer as gs
from gossamer.cli.console import print_facts, print_json, print_table, say
from gossamer.cli.errors import UsageError
from gossamer.cli.options import Json
from gossamer.evaluation.files import check_file
from gossamer.evaluation.variants import unknown_name
from gossamer.methods import Method, get_method_class
from gossamer.methods.registry import required_params


def methods(
    name: Annotated[str | None, typer.Argument(help="One method; all if left out.")] = None,
    *,
    draw: Annotated[
        Path | None,
        typer.Option("--draw", metavar="FILE", help="Draw its plans to a .png or .svg file."),
    ] = None,
    json: Json = False,
) -> None:
    """List the attention methods, or describe or draw one.

    Example: gossamer methods svg2 --draw svg2.png
    """
    if name is not None and name not in gs.list_methods():
        raise UsageError(unknown_name("method", name, gs.list_methods()))
    if draw is not None:
        if name is None:
            raise UsageError("--draw draws one method: name it, as in gossamer methods svg2 --draw")
        _draw(name, draw, as_json=json)
        return
    names = gs.list_methods() if name is None else [name]
    described = [describe_method(each) for each in names]
    if json:
        print_json(described if name is None else described[0])
    elif name is None:
        print_table(
            ("method", "what it does", "parameters"),
            [(each["name"], each["summary"], _parameters(each)) for each in described],
        )
    else:
        _print_one(described[0])


def _draw(name: str, path: Path, *, as_json: bool) -> None:
    """Write a picture of the method's plans on small examples."""
    # Listing methods needs none of the report's modules.
    from gossamer.report.drawing import SUFFIXES, write_picture
    from gossamer.report.patterns import method_panels

    check_file(path, SUFFIXES)
    panels = method_panels(name)
    write_picture(panels, f"{name}: which keys each query reads", path)
    if as_json:
        shown = [{"title": panel.title, "density": panel.density} for panel in panels]
        print_json({"out": str(path), "panels": shown})
    else:
        say(f"picture: {path}")


def describe_method(name: str) -> dict[str, Any]:
    """Return a method's name, summary, parameters with defaults, and paper, as JSON-able values.

    Beside its class stands the module to import it from, `gossamer` where that exports it.
    """
    cls = get_method_class(name)
    text = inspect.getdoc(cls) or ""
    return {
        "name": name,
        "class": cls.__qualname__,
        "module": "gossamer" if getattr(gs, cls.__name__, None) is cls else cls.__module__,
        "summary": text.partition("\n")[0],
        "parameters": _defaults(cls),
        "paper": cls.paper or None,
        "description": text,
    }


def _defaults(cls: type[Method]) -> dict[str, Any]:
    """Return a method's parameters as it has them where none is given, `"required"` for others."""
    required = required_params(cls)
    if not required:
        return cls().params()
    defaults = {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(cls)
    }
    return {**defaults, **dict.fromkeys(required, "required")}


def _parameters(described: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_show(value)}" for key, value in described["parameters"].items())


def _print_one(described: dict[str, Any]) -> None:
    facts = {"method": f"{described['name']} ({described['module']}.{described['class']})"}
    if described["paper"]:
        facts["paper"] = described["paper"]
    print_facts(facts)
    typer.echo()
    typer.echo(described["description"])
    if described["parameters"]:
        print_table(
            ("parameter", "default"),
            [(key, _show(value)) for key, value in described["parameters"].items()],
        )


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if dataclasses.is_dataclass(value):
        return repr(value)
    return str(value)
