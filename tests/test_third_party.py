"""A method of another package: found through its entry point, and held to the same laws."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "examples/third_party_method"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the package into a folder of its own; return an environment that sees it."""
    pytest.importorskip("hatchling", reason="the extra `dev` brings it")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, *offline, str(PACKAGE)], check=True, capture_output=True)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def run(environment: dict[str, str], *command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_is_listed_behind_gossamers_own(installed: dict[str, str]) -> None:
    code = "import gossamer as gs; print(gs.list_methods()[-1], gs.get_method('near-frames'))"
    assert run(installed, "-c", code).startswith("near-frames NearFrames(density=0.2")
    listed = json.loads(
        run(installed, "-c", "from gossamer.cli.app import main; main()", "methods", "--json")
    )
    assert "near-frames" in [each["name"] for each in listed]


def test_it_passes_the_laws(installed: dict[str, str]) -> None:
    out = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert "10 passed" in out


def beside(installed: dict[str, str], folder: Path, name: str, entries: str, shown: str) -> str:
    """Return what `shown` is where a further package declares methods, and what is warned of.

    `shown` are expressions in Python; `names` are those of `list_methods()`.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gossamer.methods]\n{entries}")
    path = os.pathsep.join([installed["PYTHONPATH"], str(folder)])
    code = f"""
import warnings
import gossamer as gs
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = gs.list_methods()
print({shown})
print(*[w.message for w in caught], sep="\\n")
"""
    return run({**installed, "PYTHONPATH": path}, "-c", code)


def test_one_that_does_not_load_is_left_out_with_its_name(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """The others go on working, of this package and of the broken one's neighbours."""
    shown = '"broken" in names, "near-frames" in names, "svg2" in names'
    said = beside(installed, tmp_path, "broken", "broken = no_such_module:X\n", shown)
    assert said.startswith("False True True")
    assert "'broken' (no_such_module:X) of another package does not load" in said


def test_one_that_takes_a_name_or_has_another_is_left_out(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """A built-in method stays what it is, and an entry point's name is the method's."""
    (tmp_path / "thief.py").write_text(
        'import gossamer as gs\nclass Thief(gs.Dense):\n    name = "svg2"\n'
    )
    entries = "svg2 = thief:Thief\nalias = gossamer_near_frames:NearFrames\n"
    shown = '"alias" in names, "near-frames" in names, type(gs.get_method("svg2")) is gs.SVG2'
    said = beside(installed, tmp_path, "thief", entries, shown)
    assert said.startswith("False True True")
    assert "thief.Thief cannot be registered as 'svg2', the name of gossamer.methods.svg2" in said
    assert "gossamer_near_frames.NearFrames has the name 'near-frames': name the entry" in said
