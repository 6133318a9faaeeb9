"""Writes the results in the README from the committed measurements, or checks that they are fresh.

    python tools/make_readme_results.py
    python tools/make_readme_results.py --check

The claim and the table stand between their markers in README.md, the plot in
docs/images/compare-tiny-wan.svg. All come from benchmarks/results/compare-tiny-wan.json and
nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gossamer.evaluation.files import write_text
from gossamer.report import ReportError, claim, markdown_table
from gossamer.report.document import read_results
from gossamer.report.tables import quality_plot

RESULTS = Path("benchmarks/results/compare-tiny-wan.json")
README = Path("README.md")
PLOT = Path("docs/images/compare-tiny-wan.svg")


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
    plot = f"![PSNR to dense against density]({PLOT})"
    readme = (root / README).read_text(encoding="utf-8")
    readme = _replaced(readme, "claim", claim(results))
    readme = _replaced(readme, "results", f"{plot}\n\n{markdown_table(results)}")
    return {
        root / README: readme,
        root / PLOT: quality_plot(results),
    }


def _replaced(readme: str, name: str, text: str) -> str:
    """Put text in the place of the old one, between the markers of this name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    once = readme.count(begin) == 1 and readme.count(end) == 1
    if not once or readme.index(end) < readme.index(begin):
        raise ValueError(f"{README}: expected one {begin} and, after it, one {end}")
    before, rest = readme.split(begin)
    return f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}"


def _read(path: Path) -> str | None:
    """Return a file's text, None if there is no such file."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
