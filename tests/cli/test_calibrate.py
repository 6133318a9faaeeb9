"""`gossamer calibrate`: a profile from the command line, whatever interrupts it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gossamer as gs
from gossamer.calibration import load_profile
from gossamer.methods.scaling import ScalingAttention

PROMPTS = ("a red star moves", "a blue ring moves", "a red ring moves")
SMALL = ("--block", "32", "--buckets", "2", "--steps", "3", "--work", "work")
# Each generation of the fake pipeline makes 3 steps * 2 passes * 2 layers = 12 attention calls.
CALLS = 12
KILLED = Path(__file__).parents[1] / "calibration" / "killed.py"


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_profile_is_written_and_described(run, pipe):
    result = run("calibrate", *PROMPTS, *SMALL, "--out", "a/p.safetensors")
    assert result.exit_code == 0, result.output
    assert names("a") == ["p.safetensors"]
    assert "[3/3] a red ring moves" in result.stderr
    assert "fidelity: a red star moves" in result.stderr
    for word in ("a/p.safetensors", "4x8x8", "union density", "ScalingAttention(profile="):
        assert word in result.stdout
    assert [call["prompt"] for call in pipe.calls] == [*PROMPTS, PROMPTS[0]]  # FAST's is the last
    profile = load_profile("a/p.safetensors", model="tiny-wan", num_layers=2, num_heads=2)
    assert profile.grid == (4, 8, 8)
    assert (profile.num_buckets, profile.num_steps, profile.block) == (2, 3, 32)
    assert profile.metadata["prompts"] == list(PROMPTS)
    assert profile.thresholds(1, 1, profile.grid).shape == (2, 8, 8)


def test_the_profile_serves_the_method(run, pipe):
    run("calibrate", *PROMPTS, *SMALL, "--out", "p.safetensors")
    method = ScalingAttention(profile="p.safetensors", density=0.5)
    session = gs.Session(gs.Recipe(method=method, min_tokens=0))
    q, k, v = torch.randn(3, 1, 2, 256, 16).unbind()
    for step in range(3):
        for layer in range(2):
            call = gs.Call(layer=layer, num_layers=2, step=step, num_steps=3, grid=(4, 8, 8))
            session.attention(q, k, v, call)
    assert abs(session.summary()["density"] - 0.5) <= 0.04  # one level of one of 8 maps of 8 blocks


def test_json_is_all_there_is_on_stdout(run, pipe):
    result = run("calibrate", *PROMPTS[:2], *SMALL, "--json")
    facts = json.loads(result.stdout)
    assert facts["out"] == "scaling.safetensors"
    assert (facts["complete"], facts["prompts"], facts["prompts_done"]) == (True, 2, 2)
    assert facts["grid"] == [4, 8, 8]
    first, second = facts["union_density"]
    assert 0 < first <= second <= 1


def test_the_command_in_the_profile_makes_the_same_profile(run, pipe):
    run("calibrate", "--num-prompts", "1", *SMALL, "--seed", "3", "--out", "a.safetensors")
    command = load_profile("a.safetensors").metadata["command"]
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("gossamer", "calibrate")
    result = run(verb, *arguments, "--work", "other", "--out", "b.safetensors")
    assert result.exit_code == 0, result.output
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_finished_prompts_are_not_made_again_and_more_can_be_added(run, pipe):
    made = []
    for prompts in (PROMPTS[:2], PROMPTS[:2], PROMPTS):
        pipe.calls.clear()
        assert run("calibrate", *prompts, *SMALL).exit_code == 0
        made.append([call["prompt"] for call in pipe.calls])
    # The third prompt changes the maps, so that fidelity on them is measured again.
    assert made == [[*PROMPTS[:2], PROMPTS[0]], [], [PROMPTS[2], PROMPTS[0]]]


@pytest.mark.parametrize("option", [("--seed", "5"), ("--steps", "4"), ("--guidance-scale", "2")])
def test_other_settings_are_other_measurements(run, pipe, option):
    run("calibrate", PROMPTS[0], *SMALL)
    pipe.calls.clear()
    run("calibrate", PROMPTS[0], *SMALL, *option)
    assert len(pipe.calls) == 2


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(run, pipe):
    whole = run("calibrate", *PROMPTS, *SMALL[:-1], "whole", "--out", "whole.safetensors")
    assert whole.exit_code == 0
    pipe.calls.clear()
    pipe.fail_at = {1: KeyboardInterrupt()}
    result = run("calibrate", *PROMPTS, *SMALL)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted: the same command goes on from work"
    assert not Path("scaling.safetensors").exists()
    pipe.calls.clear()
    assert run("calibrate", *PROMPTS, *SMALL).exit_code == 0
    assert [call["prompt"] for call in pipe.calls] == [*PROMPTS[1:], PROMPTS[0]]
    assert Path("scaling.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


def test_killed_at_any_moment_and_run_again_it_gives_the_same_profile(tmp_path, folder):
    """Processes that end as `kill -9` ends them, call by call and file by file."""
    # In the second prompt; with its file written and not yet in place; in FAST; with the profile
    # written and not yet in place. Then the end.
    lives = [(CALLS + 5, 77), (-1, 77), (CALLS + 5, 77), (-2, 77), (0, 0)]
    spelled = ["0:whole", *(f"{calls}:killed" for calls, _ in lives)]
    line = [sys.executable, str(KILLED), str(folder), *spelled, "--", *PROMPTS[:2], *SMALL[:-2]]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["0", *(str(code) for _, code in lives)], done.stderr
    whole, killed = (tmp_path / f"{name}.safetensors" for name in ("whole", "killed"))
    assert killed.read_bytes() == whole.read_bytes()
    left = names(tmp_path / "killed-work")
    assert left == names(tmp_path / "whole-work")
    assert len(left) == 3  # two prompts and FAST; nothing half-written
    assert sorted(names(tmp_path)) == [
        *("killed-work", "killed.safetensors", "model", "whole-work", "whole.safetensors")
    ]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_ranks_share_the_prompts_and_the_last_one_writes(run, pipe, monkeypatch, ranks):
    run("calibrate", *PROMPTS, *SMALL[:-1], "whole", "--out", "whole.safetensors")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = []
    for rank in ranks:
        pipe.calls.clear()
        monkeypatch.setenv("RANK", str(rank))
        result = run("calibrate", *PROMPTS, *SMALL, "--json")
        facts = json.loads(result.stdout)
        made.append([call["prompt"] for call in pipe.calls])
        if rank == ranks[0]:
            assert (facts["complete"], facts["out"]) == (False, None)
            assert facts["prompts_done"] == len(PROMPTS[rank::2])
            assert not Path("scaling.safetensors").exists()
    assert made[0] == list(PROMPTS[ranks[0] :: 2])
    assert made[1] == [*PROMPTS[ranks[1] :: 2], PROMPTS[0]]
    assert Path("scaling.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


def test_an_unfinished_world_says_who_writes(run, pipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    result = run("calibrate", *PROMPTS, *SMALL)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "1 of 3 prompts are measured; the process that finishes last writes" in result.stderr


def test_token_orders_are_measured_first_and_kept(run, pipe):
    for expected in (4, 0):
        pipe.calls.clear()
        assert run("calibrate", *PROMPTS[:2], *SMALL, "--permute", "axis").exit_code == 0
        assert len(pipe.calls) == expected
    profile = load_profile("scaling.safetensors")
    assert profile.permute == "axis"
    method = ScalingAttention(profile="scaling.safetensors", permute="axis", density=0.5)
    q, k, v = torch.randn(3, 1, 2, 256, 16).unbind()
    method.plan(q, k, v, gs.Call(grid=(4, 8, 8), num_steps=3)).validate()


def test_fewer_measured_steps(run, pipe):
    run("calibrate", PROMPTS[0], *SMALL, "--measured-steps", "2")
    assert load_profile("scaling.safetensors").metadata["measured"] == [0, 2]


def test_sizes_take_turns_and_the_first_is_the_profiles(run, pipe):
    sizes = ("--size", "32x32x4", "--size", "32x64x4")
    result = run("calibrate", *PROMPTS, *SMALL, *sizes)
    assert result.exit_code == 0, result.output
    profile = load_profile("scaling.safetensors")
    assert profile.metadata["sizes"] == ["32x32x4", "32x64x4"]
    assert len(pipe.calls) == 4


def test_prompts_default_to_the_models_last_ones(run, pipe):
    run("calibrate", "--num-prompts", "1", *SMALL)
    assert {call["prompt"] for call in pipe.calls} == {"a blue ring moves"}
    pipe.calls.clear()
    Path("prompts.txt").write_text("a red star\n\na blue ring\n")
    run("calibrate", "--prompts-file", "prompts.txt", *SMALL)
    assert {call["prompt"] for call in pipe.calls} == {"a red star", "a blue ring"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a pink star"], "does not know 'pink'"),
        (["--model", "."], "no prompt: give about eight"),
        (["--size", "480x832"], "--size takes HxWxF, for example 480x832x81, got '480x832'"),
        (["--buckets", "9"], "num_buckets=9: must be between 1 and num_steps=3"),
        (["--measured-steps", "9"], "9 measured steps: must be between 1 and num_steps=3"),
        (["--permute", "rows"], "permute='rows': must be one of"),
        (["--fast-prompts", "9"], "fast_prompts=9: must be between 1 and the 2 prompts"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--prompts-file", "no.txt"], "no.txt: no such file"),
    ],
)
def test_bad_input_is_one_line_with_the_fix(run, pipe, arguments, words):
    buckets = () if "--buckets" in arguments else ("--buckets", "2")
    result = run("calibrate", *arguments, *buckets)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert pipe.calls == []
    assert not list(Path.cwd().iterdir())


def test_a_bad_environment_is_one_line(run, pipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    result = run("calibrate", PROMPTS[0])
    assert result.exit_code == 2
    assert "WORLD_SIZE='two' in the environment is no whole number" in result.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    result = run("calibrate", PROMPTS[0], "--buckets", "2")
    assert result.exit_code == 2
    assert "rank=2: must be at least 0 and below world=2" in result.stderr


def test_help_has_an_example(run):
    result = run("calibrate", "--help")
    assert "Example: gossamer calibrate" in result.stdout
    assert "--json" in result.stdout
