"""`gossamer methods`: every method with its parameters, defaults and paper."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import typer

import gossamer as gs
from gossamer.cli.console import print_facts, print_json, print_table
from gossamer.cli.errors import UsageError
from gossamer.cli.options import Json
from gossamer.evaluation.variants import unknown_name


def methods(
    name: Annotated[str | None, typer.Argument(help="One method; all if left out.")] = None,
    *,
    json: Json = False,
) -> None:
    """List the attention methods, or describe one.

    Example: gossamer methods svg2
    """
    if name is not None and name not in gs.list_methods():
        raise UsageError(unknown_name("method", name, gs.list_methods()))
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


def describe_method(name: str) -> dict[str, Any]:
    """Return a method's name, summary, parameters with defaults, and paper, as JSON-able values."""
    method = gs.get_method(name)
    text = inspect.getdoc(type(method)) or ""
    return {
        "name": name,
        "class": type(method).__name__,
        "summary": text.partition("\n")[0],
        "parameters": method.params(),
        "paper": method.paper or None,
        "description": text,
    }


def _parameters(described: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_show(value)}" for key, value in described["parameters"].items())


def _print_one(described: dict[str, Any]) -> None:
    facts = {"method": f"{described['name']} (gossamer.{described['class']})"}
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
