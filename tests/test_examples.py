"""What a reader may copy runs: the scripts in examples/, the Python blocks of the pages."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A block that cannot run here says why in the line above it: <!-- not run: a 14B model -->
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that can run."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for skipped, code in found if not skipped]


PAGES_WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), "an example shows something"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda path: path.name)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page), start=1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)  # noqa: S102 -- our pages


def test_quick_start_is_the_example() -> None:
    """README, quick-start page and examples/quickstart.py show the same ten lines."""
    source = (ROOT / "examples/quickstart.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    code = source.split(f'"""{docstring}"""', 1)[1].strip()
    for page in (ROOT / "README.md", ROOT / "docs/quickstart.md"):
        assert code in page.read_text(encoding="utf-8"), f"{page.name} shows other lines"
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) - sum("import" in line for line in lines) <= 10
