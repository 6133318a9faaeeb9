"""What goes to stdout, what to stderr, and how numbers are shown."""

from __future__ import annotations

import sys
import warnings

import pytest

from gossamer.cli.console import ProgressBar, print_json, print_table, quiet_libraries
from gossamer.cli.model import warn_if_busy
from gossamer.cli.results import print_results


def run(recipe, **changes):
    facts = {
        "recipe": recipe,
        "density": 1.0,
        "psnr_db": None,
        "ssim": None,
        "st_lpips": None,
        "attention_ms": 2000.0,
        "plan_ms": 0.0,
        "total_ms": 3000.0,
        "kernel": "cpu",
    }
    return {**facts, **changes}


def cells(line):
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_results_are_means_over_runs(capsys):
    sparse = {"attention_ms": 500.0, "plan_ms": 100.0, "ssim": 0.5, "density": 0.15}
    document = {
        "runs": [
            run("dense"),
            run("svg2", **sparse, psnr_db=20.0),
            run("dense"),
            run("svg2", **sparse, psnr_db=30.0),
            run("same", psnr_db="inf"),
        ]
    }
    print_results(document)
    lines = [cells(line) for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert lines[0][:7] == ["dense", "2", "1.000", "-", "-", "-", "2.00"]
    assert lines[1][:7] == ["svg2", "2", "0.150", "25.00", "0.5000", "-", "0.50"]
    assert lines[1][7:] == ["20%", "3.00", "4.00x", "cpu"]
    assert lines[2][3] == "∞"


def test_names_in_a_table_stay_whole(capsys):
    name = "a-name-that-somebody-will-copy"
    print_table(("name", "what"), [(name, "word " * 60)])
    assert name in capsys.readouterr().out


def test_json_is_strict(capsys):
    print_json({"a": "ü"})
    assert capsys.readouterr().out == '{\n  "a": "ü"\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        print_json({"a": float("nan")})


def test_libraries_cannot_reach_stdout_or_warn(capsys):
    with quiet_libraries():
        print("from a library")
        warnings.warn_explicit("from a library", FutureWarning, "x.py", 1, module="diffusers.utils")
        with pytest.warns(UserWarning, match="ours"):
            warnings.warn("ours", UserWarning, stacklevel=1)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "from a library\n")


def test_progress_is_a_line_per_run_where_nobody_watches(capsys):
    with ProgressBar() as bar:
        for step in range(3):
            bar.update("[1/2] dense", step, 6)
        bar.update("[2/2] svg2", 3, 6)
    assert capsys.readouterr() == ("", "[1/2] dense\n[2/2] svg2\n")


def test_progress_is_a_bar_with_the_time_left_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar() as bar:
        bar.update("[1/2] dense", 0, 6)
        bar.update("[2/2] svg2", 3, 6)
    output = capsys.readouterr()
    assert output.out == ""
    for word in ("[2/2] svg2", "3/6", "left"):
        assert word in output.err


@pytest.mark.parametrize(
    ("load", "policy", "device", "told"),
    [
        (9.0, None, "cpu", True),
        (9.0, "PASSIVE", "cpu", False),
        (9.0, None, "cuda", False),
        (2.0, None, "cpu", False),
    ],
)
def test_a_busy_machine_is_mentioned(capsys, monkeypatch, load, policy, device, told):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    warn_if_busy(device)
    assert ("load 9.0 on 2 cores" in capsys.readouterr().err) == told
