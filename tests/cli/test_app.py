"""What all commands have in common: their surface, help, and errors of one line."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import gossamer as gs
from gossamer.cli import generate as generate_module
from gossamer.cli.app import app, main
from gossamer.errors import MissingExtraError

VERBS = ["doctor", "methods", "generate", "compare", "fidelity", "bench", "calibrate", "report"]
SURFACE = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """Every command with its arguments and options, one a line."""
    lines = []
    for name, command in get_command(app).commands.items():
        lines.append(name)
        for parameter in command.params:
            spelling = " ".join([*parameter.opts, *parameter.secondary_opts])
            required = " (required)" if parameter.required else ""
            lines.append(f"  {spelling}{required}")
    return "\n".join(lines) + "\n"


def test_the_surface_is_frozen():
    """A changed command or option breaks scripts: change surface.txt and the CHANGELOG with it."""
    assert surface() == SURFACE.read_text()


def check_error(result, *words):
    """Check for exit code 2 and one line on stderr, and nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help_with_an_example_and_json(run, verb):
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert f"Example: gossamer {verb}" in result.stdout
    assert "--json" in result.stdout


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_command_alone_lists_its_verbs(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert all(verb in result.stdout for verb in VERBS)


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{gs.__version__}\n")


def test_the_installed_command_runs():
    code = (
        "import sys; sys.argv = ['gossamer', 'nonsense']; from gossamer.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No such command 'nonsense'")


def test_main_exits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gossamer", "--version"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"{gs.__version__}\n"


P = "a red star moves"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # unknown names, with the nearest
        (["compre"], ["No such command 'compre'", "compare"]),
        (["generate", P, "--stepz", "3"], ["No such option: --stepz", "--steps"]),
        (["methods", "svg22"], ["unknown method 'svg22'; did you mean 'svg2'?"]),
        (["generate", P, "--method", "svg22"], ["unknown method 'svg22'; did you mean 'svg2'?"]),
        (["generate", P, "--kernel", "tritn"], ["unknown kernel 'tritn'"]),
        (["generate", P, "--recipe", "svg22"], ["no recipe 'svg22'", "did you mean 'svg2'?"]),
        (["compare", P, "--methods", "svg22@.2"], ["unknown method 'svg22'; did you mean 'svg2'?"]),
        (["generate", P, "--model", "tiny-wam"], ["unknown model 'tiny-wam'", "'tiny-wan'"]),
        # budgets
        (["generate", P, "--density", "nan"], ["--density must be above 0 and at most 1, got nan"]),
        (["generate", P, "--density", "0"], ["--density must be above 0 and at most 1, got 0"]),
        (["generate", P, "--density", "1.5"], ["--density must be above 0 and at most 1, got 1.5"]),
        (["fidelity", "--density", ".1,0"], ["--density must be above 0 and at most 1, got 0"]),
        (
            ["generate", P, "--method", "svg2@.2", "--density", ".3"],
            ["--method svg2@.2 and --density 0.3 are two densities"],
        ),
        (["generate", P, "--density", "much"], ["--density"]),
        (["compare", P, "--methods", "svg2@2"], ["'svg2@2'", "above 0 and at most 1"]),
        (["generate", P, "--dense-steps", "1.5"], ["dense_steps=1.5", "between 0.0 and 1.0"]),
        (["generate", P, "--dense-layers", "some"], ["dense_layers='some'"]),
        # sizes and numbers
        (["generate", P, "--steps", "0"], ["steps must be at least 1, got 0"]),
        (["generate", P, "--height", "-16"], ["height must be at least 1, got -16"]),
        (["generate", P, "--guidance-scale", "nan"], ["guidance_scale must be a finite number"]),
        (["generate", P, "--threads", "0"], ["--threads"]),
        (["generate", P, "--device", "tpu9"], ["--device tpu9", "use --device cpu"]),
        (["compare", P, "--seeds", "one"], ["--seeds takes whole numbers with commas, got 'one'"]),
        (["compare", P, "--seeds", "1,1"], ["seed 1 is given 2 times"]),
        (["compare", P, "--shard", "2"], ["--shard takes I/N, for example 1/4, got '2'"]),
        (["compare", P, "--shard", "3/2"], ["shard 3/2"]),
        # prompts
        (["generate"], ["Missing argument"]),
        (["generate", " "], ["a prompt is empty"]),
        (["generate", "a pink star"], ["does not know 'pink'", "red", "'a red star moves'"]),
        (["compare"], ["no prompt", "'a red star moves'", "--prompts-file"]),
        (["compare", "--prompts-file", "no.txt"], ["no.txt: no such file"]),
        # options that contradict each other
        (["generate", P, "--recipe", "svg2", "--density", ".2"], ["leave out --recipe"]),
        (
            ["generate", P, "--method", "dense", "--density", ".2"],
            ["--density 0.2: dense attention has density 1"],
        ),
        (["compare", P, "--methods", "svg2@.2,svg2@.2"], ["'svg2@0.2' is given 2 times"]),
        (["compare", P, "--methods", ","], ["no method"]),
        (["compare", "--demo", "--model", "."], ["--demo is for the bundled model"]),
        # files
        (["report", "no.json"], ["no.json"]),
    ],
)
def test_bad_input_is_one_line_with_the_fix(run, pipe, arguments, words):
    result = run(*arguments)
    check_error(result, *words)
    assert not list(Path.cwd().iterdir())
    assert pipe.calls == []


@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_an_unwritable_folder_is_found_before_anything_runs(run, pipe, tmp_path, verb):
    (tmp_path / "file").touch()
    result = run(verb, P, "--out", tmp_path / "file" / "out.mp4")
    check_error(result, f"{tmp_path / 'file'}: not a directory", "a part of the path is a file")
    assert pipe.calls == []


def test_a_recipe_with_an_unknown_key_names_the_nearest(run, pipe, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('dense_step = 2\n[method]\nname = "svg2"\n')
    check_error(
        run("generate", P, "--recipe", recipe), "'dense_step'", "did you mean 'dense_steps'"
    )


def test_a_folder_that_is_no_pipeline(run, tmp_path):
    check_error(run("generate", "x", "--model", tmp_path), "no model_index.json", "save_pretrained")


def test_an_unreadable_pipeline(run, tmp_path):
    pytest.importorskip("diffusers")
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline", "vae": ["x", "Y"]}')
    check_error(run("generate", "x", "--model", tmp_path), f"cannot load {tmp_path}")
    (tmp_path / "model_index.json").write_text("{")
    check_error(run("generate", "x", "--model", tmp_path), f"cannot load {tmp_path}")


def raise_(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ["no space left", "free some space"]),
        (PermissionError(errno.EACCES, "Permission denied", "x.mp4"), ["x.mp4: permission denied"]),
        (gs.UnsupportedError(["no CUDA device", "head dim 72"]), ["no CUDA device; head dim 72"]),
        (MissingExtraError("eval", "av"), ['needs av: pip install "gossamer[eval]"']),
        (ValueError("two\nlines"), ["two lines"]),
    ],
)
def test_errors_of_the_library_are_one_line(run, pipe, monkeypatch, error, words):
    monkeypatch.setattr(generate_module, "require_av", raise_(error))
    check_error(run("generate", P), *words)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_traceback_wherever_it_stands(run, place):
    arguments = ["methods", "nope"]
    arguments.insert(place, "--debug")
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: unknown method 'nope'")


def test_faults_of_the_program_are_not_dressed_up(run, pipe, monkeypatch):
    monkeypatch.setattr(generate_module, "require_av", raise_(ZeroDivisionError("a bug")))
    result = run("generate", P)
    assert isinstance(result.exception, ZeroDivisionError)
    assert "error:" not in result.stderr
