"""The registry of methods and orders: one name, one class."""

from __future__ import annotations

import json
import types
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

import gossamer as gs
from gossamer.cli.methods import describe_method
from gossamer.methods import register, registry
from gossamer.order import base as orders
from gossamer.testing import METHOD_LAWS


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test change the registries and leave them as they were."""
    gs.list_methods()
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(orders, "_registry", dict(orders._registry))


@dataclass(frozen=True, kw_only=True)
class Own(gs.BlockTopK):
    """Another name for blocks.

    Attributes:
        density: As there.
    """

    name: ClassVar[str] = "own"


@dataclass(frozen=True, kw_only=True)
class Thief(gs.BlockTopK):
    """Takes the name of a method that ships."""

    name: ClassVar[str] = "svg2"


class Nameless(gs.Method):
    """Has no name."""


class Entry(types.SimpleNamespace):
    """An entry point that loads a class."""

    def load(self) -> object:
        """Return the class."""
        return self.cls


def entries(monkeypatch: pytest.MonkeyPatch, **classes: object) -> None:
    """Let the installed packages declare these classes, by the names of their entry points."""
    found = [Entry(name=name, value=f"m:{name}", cls=cls) for name, cls in classes.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group else [])
    registry._load_entry_points.cache_clear()


def test_a_registered_class_is_found_by_name_and_obeys_the_laws() -> None:
    assert register(Own) is Own
    assert gs.list_methods()[-1] == "own"
    assert gs.get_method("own", density=0.4) == Own(density=0.4)
    for law in METHOD_LAWS:
        law("own")


def test_the_same_class_may_come_again() -> None:
    """As when a module is reloaded, or a notebook's cell is run once more."""
    register(Own)
    again = dataclass(frozen=True, kw_only=True)(
        type("Own", (gs.BlockTopK,), {"name": "own", "__module__": __name__})
    )
    register(again)
    assert type(gs.get_method("own")) is again


def test_a_name_that_is_taken_is_refused_with_both_classes() -> None:
    with pytest.raises(gs.PlanError) as caught:
        register(Thief)
    message = str(caught.value)
    assert f"{__name__}.Thief cannot be registered as 'svg2'" in message
    assert "the name of gossamer.methods.svg2.SVG2: give it a name of its own" in message
    assert type(gs.get_method("svg2")) is gs.SVG2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict, "the class dict cannot be registered: must be a subclass of Method"),
        (Own(), "a .*Own cannot be registered"),
        (Nameless, r'Nameless has no name: write name: ClassVar\[str\] = "my-method"'),
    ],
)
def test_what_is_no_method_class_is_refused(given: object, message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        register(given)


def test_an_order_keeps_its_name_as_well() -> None:
    other = type("Other", (gs.WaveAlign,), {})
    with pytest.raises(gs.PlanError, match=r"Other cannot be .*'wavealign', .*\.WaveAlign"):
        orders.register(other)
    assert orders.register(gs.WaveAlign) is gs.WaveAlign


@pytest.mark.parametrize(
    ("name", "cls", "reason"),
    [
        ("svg2", Thief, "Thief cannot be registered as 'svg2', the name of gossamer.methods.svg2"),
        ("other", Own, r"Own has the name 'own': name the entry point and the class alike"),
        ("none", Nameless, "Nameless has no name"),
        ("dict", dict, "the class dict cannot be registered"),
        ("module", types, "a module cannot be registered"),
    ],
)
def test_an_entry_point_that_lies_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, name: str, cls: object, reason: str
) -> None:
    before = dict(registry._registry)
    entries(monkeypatch, **{name: cls})
    with pytest.warns(UserWarning, match=rf"'{name}' \(m:{name}\) .* is left out: .*{reason}"):
        names = gs.list_methods()
    assert registry._registry == before
    assert len(names) == len(before)


def test_of_two_packages_the_first_keeps_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = type("Rival", (Own,), {})
    found = [Entry(name="own", value=f"m:{cls.__name__}", cls=cls) for cls in (Own, rival)]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group else [])
    registry._load_entry_points.cache_clear()
    with pytest.warns(UserWarning, match=r"m:Rival.*Rival cannot .*'own', the name of .*\.Own"):
        assert type(gs.get_method("own")) is Own


def test_a_class_in_place_of_its_name_says_how_to_register_it() -> None:
    with pytest.raises(gs.PlanError, match=r"method the class Own: .*gossamer.methods.register"):
        gs.get_method(Own)


def test_the_command_line_names_the_module_to_import_from() -> None:
    from typer.testing import CliRunner

    from gossamer.cli.app import app

    register(Own)
    text = CliRunner().invoke(app, ["methods", "own"]).output
    assert f"own ({__name__}.Own)" in " ".join(text.split())
    assert "svg2 (gossamer.SVG2)" in CliRunner().invoke(app, ["methods", "svg2"]).output
    described = json.loads(CliRunner().invoke(app, ["methods", "own", "--json"]).output)
    assert (described["module"], described["class"]) == (__name__, "Own")


def test_a_parameter_without_default_is_asked_for() -> None:
    @register
    @dataclass(frozen=True, kw_only=True)
    class Needy(Own):
        name: ClassVar[str] = "needy"
        radius: int
        sides: tuple[int, ...] = field(default_factory=lambda: (1, 2))

    with pytest.raises(gs.PlanError, match="needy needs radius: give a value, or a density"):
        gs.get_method("needy")
    assert gs.get_method("needy", radius=3) == Needy(radius=3)
    parameters = describe_method("needy")["parameters"]
    assert (parameters["radius"], parameters["sides"]) == ("required", (1, 2))
