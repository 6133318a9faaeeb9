"""What a user installs: light imports, a documented surface, one version, recipes that load."""

import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import gossamer

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = [
    "IPython", "accelerate", "av", "diffusers", "flash_attn", "ftfy", "huggingface_hub", "jinja2",
    "peft", "plotly", "rich", "safetensors", "stlpips_pytorch", "tokenizers", "torchvision",
    "transformers", "triton", "typer",
]  # fmt: skip

# As if the packages were not installed: they are not found, neither by import nor by find_spec.
PREAMBLE = """
import json, sys, warnings
from importlib.machinery import PathFinder

HIDDEN = set(json.loads(sys.argv[1]))

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in HIDDEN
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def run_without(code: str, *hidden: str) -> str:
    """Run code in a fresh interpreter in which the given packages do not exist."""
    script = PREAMBLE + textwrap.dedent(code)
    command = [sys.executable, "-W", "error", "-c", script, json.dumps(hidden)]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def public_names() -> list[str]:
    return [name for name in gossamer.__all__ if name != "__version__"]


def test_import_needs_torch_alone() -> None:
    run_without("import gossamer", *OPTIONAL)


def test_import_loads_no_optional_package() -> None:
    """What is installed stays unloaded, too: an import must not cost what nobody asked for."""
    out = run_without("import gossamer; print(json.dumps(list(sys.modules)))")
    loaded = {name.partition(".")[0] for name in json.loads(out)}
    assert not loaded & set(OPTIONAL)


def test_every_method_runs_with_torch_alone() -> None:
    """Planning and attention need no optional package either, not even numpy."""
    out = run_without(
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that numpy is absent
            import torch
        import gossamer as gs

        q, k, v = torch.randn(3, 1, 2, 96, 16).unbind()
        names = gs.list_methods()
        for name in names:
            density = 1.0 if name == "dense" else 0.5
            out = gs.sparse_attention(q, k, v, gs.get_method(name, density=density))
            assert out.shape == q.shape and out.isfinite().all(), name
        recipe = gs.Recipe(method=gs.get_method("svg2"), min_tokens=0)
        session = gs.Session(gs.Recipe.from_toml(recipe.to_toml()))
        session.attention(q, k, v, gs.Call(layer=0, num_layers=1, step=0, num_steps=1))
        print(len(names), session.records[0].path)
        """,
        "numpy",
        *OPTIONAL,
    )
    assert out.split() == [str(len(gossamer.list_methods())), "sparse"]


def test_missing_package_names_its_extra() -> None:
    """Attaching to a model without diffusers says what to install."""
    out = run_without(
        """
        import torch, gossamer as gs
        try:
            gs.apply(torch.nn.Linear(2, 2), gs.Recipe(method=gs.get_method("svg2")))
        except ImportError as error:
            print(error)
        """,
        "diffusers",
    )
    assert 'pip install "gossamer[diffusers]"' in out


def test_public_names_are_the_documented_ones() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: gossamer\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(public_names())
    assert len(set(documented)) == len(documented)


@pytest.mark.parametrize("name", public_names())
def test_public_name_is_documented_in_code(name: str) -> None:
    item = getattr(gossamer, name)
    assert inspect.getdoc(item), f"gossamer.{name} has no docstring"
    if not inspect.isclass(item):
        return
    own = [member for member in vars(item) if not member.startswith("_")]
    for member in own:
        value = inspect.getattr_static(item, member)
        if inspect.isroutine(value) or isinstance(value, property):
            assert inspect.getdoc(value), f"gossamer.{name}.{member} has no docstring"


def test_version_is_single_sourced() -> None:
    """The package says its version once; metadata and changelog follow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert importlib.metadata.version("gossamer") == gossamer.__version__
    assert f"\n## [{gossamer.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", gossamer.list_recipes())
def test_shipped_recipe_loads(name: str) -> None:
    recipe = gossamer.Recipe.load(name)
    assert gossamer.Recipe.from_toml(recipe.to_toml()) == recipe


def test_there_are_shipped_recipes() -> None:
    assert gossamer.list_recipes()


def test_pinned_versions_satisfy_the_declared_ranges() -> None:
    """constraints.txt pins versions inside the ranges of pyproject.toml."""
    pytest.importorskip("packaging", reason="pytest brings it")
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version, prereleases=True), (
            f"constraints.txt pins {requirement.name}=={version}, pyproject.toml asks {requirement}"
        )
