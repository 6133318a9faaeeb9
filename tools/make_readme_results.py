"""Writes the results in the README from the committed measurements, or checks that they are fresh.

    python tools/make_readme_results.py
    python tools/make_readme_results.py --check

The table stands between the two markers of README.md, the plot in docs/images/compare-tiny-wan.svg.
Both come from benchmarks/results/compare-tiny-wan.json and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gossamer.evaluation.files import write_text
from gossamer.report import ReportError, markdown_table
from gossamer.report.document import read_results
from gossamer.report.tables import quality_plot

RESULTS = Path("benchmarks/results/compare-tiny-wan.json")
README = Path("README.md")
PLOT = Path("docs/images/compare-tiny-wan.svg")
BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"


def main(arguments: list[str] | None = None) -> int:
    """Run the script and return its exit status: 1 if `--check` found something stale."""
    parser = argparse.ArgumentParser(
        description="Write the README's results from the measurements."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="the checkout (default: the one this script lies in)",
    )
    options = parser.parse_args(arguments)
    try:
        stale = [path for path, text in _wanted(options.root).items() if _read(path) != text]
        if not options.check:
            for path in stale:
                write_text(path, _wanted(options.root)[path])
    except (ReportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in stale:
        name = path.relative_to(options.root)
        print(
            f"{name}: stale, run tools/make_readme_results.py" if options.check else f"wrote {name}"
        )
    return 1 if stale and options.check else 0


def _wanted(root: Path) -> dict[Path, str]:
    """Return what each generated file should hold."""
    results = read_results(root / RESULTS, with_files=False)
    block = (
        f"{BEGIN}\n\n![PSNR to dense against density]({PLOT})\n\n{markdown_table(results)}\n{END}"
    )
    return {
        root / README: _replaced((root / README).read_text(encoding="utf-8"), block),
        root / PLOT: quality_plot(results),
    }


def _replaced(readme: str, block: str) -> str:
    """Put a block in the place of the old one, markers included."""
    if (
        readme.count(BEGIN) != 1
        or readme.count(END) != 1
        or readme.index(END) < readme.index(BEGIN)
    ):
        raise ValueError(f"{README}: expected one {BEGIN} and, after it, one {END}")
    before, rest = readme.split(BEGIN)
    return before + block + rest.split(END)[1]


def _read(path: Path) -> str | None:
    """Return a file's text, None if there is no such file."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
