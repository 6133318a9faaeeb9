"""Sessions: schedules, state per branch, records, and the end of a generation."""

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.session import AttentionEvent
from oracle import attention

TENSORS = Shape(1, 2, 1, 300, 300, 16, 3).tensors()


def session(method: gs.Method | None = None, **settings: object) -> gs.Session:
    """Return a session that sparsifies short sequences too."""
    method = gs.InstaGen(density=0.3) if method is None else method
    return gs.Session(gs.Recipe(method=method, **{"min_tokens": 0, **settings}))


def call(step: int = 0, layer: int = 0, branch: str = "cond", **more: object) -> gs.Call:
    return gs.Call(step=step, num_steps=10, layer=layer, num_layers=4, branch=branch, **more)


def test_a_sparse_call_equals_planning_and_attending() -> None:
    out = session().attention(*TENSORS, call())
    assert torch.equal(out, gs.sparse_attention(*TENSORS, gs.InstaGen(density=0.3), call()))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dense_steps": 11}, "dense_steps=11 asks for 11 steps, but there are 10: all of them"),
        ({"dense_steps": (0, 12)}, r"dense_steps=\(0, 12\) asks for 12 steps, but there are 10"),
        (
            {"dense_steps": "0-2,10"},
            "dense_steps='0-2,10' names step 10, but there are 10,",
        ),
        ({"dense_layers": "0,3-7"}, "dense_layers='0,3-7' names layer 4 to 7, but there are 4"),
        ({"dense_layers": 5}, "dense_layers=5 asks for 5 layers, but there are 4"),
        ({"reuse": gs.Reuse(anchors="3,20")}, "reuse: anchors='3,20' names step 20, but there are"),
    ],
)
def test_steps_and_layers_that_do_not_exist_are_said_once(
    settings: dict[str, object], complaint: str
) -> None:
    run = session(**settings)
    unknown = gs.Call(layer=3, step=9)  # nothing to compare with, and nothing said
    if not isinstance(settings.get("dense_steps"), tuple):
        run.attention(*TENSORS, unknown)
    with pytest.warns(UserWarning, match=complaint) as caught:
        run.attention(*TENSORS, call(step=9, layer=3))
    assert [warning.filename for warning in caught] == [__file__]
    run.attention(*TENSORS, call(step=9, layer=2))  # warnings are errors
    run.end_generation()
    run.attention(*TENSORS, call(step=0))


@pytest.mark.parametrize(
    "settings",
    [
        {"dense_steps": 10, "dense_layers": 4},
        {"dense_steps": (10, 10), "dense_layers": 1.0},
        {"dense_steps": "0-9", "dense_layers": "3"},
        {"dense_steps": "", "reuse": gs.Reuse(anchors="9")},
        {"reuse": gs.Reuse(every=99)},
    ],
)
def test_steps_and_layers_that_exist_are_no_reason_to_warn(settings: dict[str, object]) -> None:
    session(**settings).attention(*TENSORS, call(step=9, layer=3))  # warnings are errors


def test_a_record_says_everything() -> None:
    run = session()
    run.attention(*TENSORS, call(step=2, layer=1, branch="uncond"))
    [record] = run.records
    facts = record.to_dict()
    times = {name: facts.pop(name) for name in ("plan_ms", "kernel_ms", "attention_ms")}
    assert facts == {
        "layer": 1,
        "num_layers": 4,
        "step": 2,
        "num_steps": 10,
        "branch": "uncond",
        "batch": 1,
        "num_heads": 2,
        "num_queries": 300,
        "num_keys": 300,
        "path": "sparse",
        "kernel": "cpu",
        "reason": "",
        "density": pytest.approx(0.3, abs=0.01),
    }
    assert min(times.values()) > 0
    assert times["attention_ms"] == times["plan_ms"] + times["kernel_ms"]
    assert "path='sparse'" in repr(record)


@pytest.mark.parametrize(
    ("settings", "where", "reason"),
    [
        ({"dense_steps": 2}, {"step": 1}, "dense step"),
        ({"dense_steps": 0.15}, {"step": 1}, "dense step"),
        ({"dense_steps": (0, 1)}, {"step": 9}, "dense step"),
        ({"dense_layers": "1,3"}, {"layer": 3}, "dense layer"),
        ({"min_tokens": 301}, {}, "short: 300 tokens < min_tokens=301"),
        ({"method": gs.Dense()}, {}, "dense method"),
    ],
)
def test_dense_calls_say_why(
    settings: dict[str, object], where: dict[str, int], reason: str
) -> None:
    run = session(**settings)
    out = run.attention(*TENSORS, call(**where))
    [record] = run.records
    assert (record.path, record.kernel, record.reason) == ("dense", "sdpa", reason)
    assert (record.density, record.plan_ms) == (1.0, 0.0)
    torch.testing.assert_close(out.double(), attention(*TENSORS).out, rtol=1e-4, atol=1e-5)


def test_short_sequences_go_dense_by_default() -> None:
    run = gs.Session(gs.Recipe(method=gs.InstaGen()))
    run.attention(*TENSORS)
    assert run.records[0].path == "dense"
    assert run.records[0].reason.startswith("short: 300 tokens")


def test_a_schedule_that_needs_the_total_asks_for_it() -> None:
    with pytest.raises(gs.RecipeError, match="needs the total number, which the call does not say"):
        session(dense_steps=0.3).attention(*TENSORS, gs.Call())


def test_bad_geometry_fails_at_the_first_call_though_it_is_dense() -> None:
    run = session(dense_steps=2)
    with pytest.raises(gs.PlanError, match=r"grid 11\*48\*85 = 44880 .*but the sequence has 300"):
        run.attention(*TENSORS, call(grid=(11, 48, 85)))


def moving(step: int) -> tuple[torch.Tensor, ...]:
    """Return tensors that change a little from step to step."""
    noise = torch.Generator().manual_seed(step)
    return tuple(x + 0.05 * torch.randn(x.shape, generator=noise) for x in TENSORS)


def generation(
    run: gs.Session, branches: tuple[str, ...] = ("cond", "uncond")
) -> list[torch.Tensor]:
    return [
        run.attention(*moving(7 * step + len(branch)), call(step=step, branch=branch))
        for step in range(4)
        for branch in branches
    ]


def test_state_is_kept_per_branch() -> None:
    """Interleaved passes give what each gives alone."""
    both = generation(session())
    alone = [generation(session(), (branch,)) for branch in ("cond", "uncond")]
    for i in range(4):
        assert torch.equal(both[2 * i], alone[0][i])
        assert torch.equal(both[2 * i + 1], alone[1][i])


def test_the_second_generation_equals_the_first() -> None:
    run = session()
    first = generation(run)
    run.end_generation()
    assert all(torch.equal(a, b) for a, b in zip(first, generation(run), strict=True))


def test_state_makes_the_second_step_warm() -> None:
    run = session()
    warm = generation(run, ("cond",))[1]
    cold = session().attention(*moving(7 + 4), call(step=1))
    assert not torch.equal(warm, cold)


def test_records_outlive_the_generation_and_not_the_next_ones_first_call() -> None:
    run = session()
    generation(run)
    run.end_generation()
    assert len(run.records) == 8
    run.attention(*TENSORS, call())
    assert len(run.records) == 1
    run.reset()
    assert run.records == []


@pytest.mark.parametrize("first", [300, 200])
def test_another_shape_between_leaves_no_trace(first: int) -> None:
    """A, B, A gives the same as fresh sessions (stale plans and buffers)."""
    run = session()
    sizes = [first, 500 - first, first]
    for step, size in enumerate(sizes):
        part = [x[:, :, :size] for x in TENSORS]
        got = run.attention(*part, call(step=step))
        want = session().attention(*part, call(step=step))
        assert torch.equal(got, want)


def test_static_plans_are_made_once_per_shape_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    method = gs.BlockTopK(density=0.5)
    monkeypatch.setattr(type(method), "static_key", lambda self, call: call.layer % 2)
    run = session(method)
    for layer in (0, 1, 2):
        run.attention(*TENSORS, call(layer=layer))
    run.attention(*[x[:, :, :200] for x in TENSORS], call())
    assert [record.reason for record in run.records] == ["", "", "static plan", ""]


def test_the_summary_counts_dense_steps_in_the_density() -> None:
    run = session(gs.InstaGen(density=0.2), dense_steps=1)
    generation(run)
    summary = run.summary()
    assert (summary["calls"], summary["dense_calls"], summary["sparse_calls"]) == (8, 2, 6)
    assert summary["density"] == pytest.approx((2 * 1.0 + 6 * 0.2) / 8, abs=0.01)
    assert summary["kernels"] == {"sdpa": 2, "cpu": 6}
    assert summary["reasons"] == {"dense step": 2}
    assert 0 < summary["plan_share"] < 1
    assert summary["attention_ms"] == pytest.approx(sum(r.attention_ms for r in run.records))


def test_an_empty_session_has_a_summary() -> None:
    assert session().summary()["density"] == 1.0


def test_the_observer_sees_every_call() -> None:
    seen: list[AttentionEvent] = []
    recipe = gs.Recipe(method=gs.InstaGen(density=0.3), min_tokens=0, dense_steps=1)
    run = gs.Session(recipe, observer=seen.append)
    outs = [run.attention(*TENSORS, call(step=step)) for step in range(2)]
    assert seen[0].plan is None
    assert seen[1].plan is not None
    assert seen[1].plan.density == seen[1].record.density
    assert all(torch.equal(event.out, out) for event, out in zip(seen, outs, strict=True))
    assert seen[1].call.step == 1


def test_an_explicit_kernel_is_the_one_that_runs() -> None:
    run = session(kernel="reference")
    run.attention(*TENSORS, call())
    assert run.records[0].kernel == "reference"


@pytest.mark.parametrize("heads", [(3, 2), (33, 2)])
def test_heads_that_do_not_divide_are_refused_before_any_work(heads: tuple[int, int]) -> None:
    q, k = (torch.randn(1, h, 50, 8) for h in heads)
    with pytest.raises(
        gs.PlanError, match=f"{heads[0]} query heads are not a multiple of {heads[1]}"
    ):
        session().attention(q, k, k)


@pytest.mark.parametrize("valid", [None, torch.arange(300)[None] < 250])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_queries", [300, 40])
def test_the_dense_path_is_right_for_every_mask(
    valid: torch.Tensor | None, causal: bool, num_queries: int
) -> None:
    q, k, v = Shape(1, 2, 2, num_queries, 300, 16, 3).tensors()
    if valid is not None:
        k, v = (x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (k, v))
    out = session(gs.Dense()).attention(q, k, v, gs.Call(causal=causal, key_valid=valid))
    plan = gs.Dense().plan(q, k, v, gs.Call(causal=causal, key_valid=valid))
    want = gs.attend(q, k, v, plan, kernel="reference").out
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_what_can_never_run_fails_at_the_first_call_though_it_is_dense() -> None:
    with pytest.raises(gs.UnsupportedError, match="instagen has no causal form"):
        session(dense_steps=2).attention(*TENSORS, call(causal=True))


def test_what_is_no_recipe_or_method_is_refused_with_the_fix() -> None:
    with pytest.raises(gs.RecipeError, match=r"recipe='svg2' is not a recipe: use gossamer.Recipe"):
        gs.Session("svg2")
    with pytest.raises(gs.PlanError, match=r"method='svg2' is not a method: use .*get_method"):
        gs.sparse_attention(*TENSORS, "svg2")
    with pytest.raises(gs.PlanError, match="method 3: give its name, one of dense, instagen"):
        gs.get_method(3)
    with pytest.raises(gs.PlanError, match="scale=nan: must be a finite number"):
        gs.attend(*TENSORS, gs.Dense().plan(*TENSORS), scale=float("nan"))


def test_a_density_that_geometry_fixes_says_so_in_the_record() -> None:
    run = session(gs.get_method("intra", density=0.3))
    run.attention(*TENSORS, call())
    run.attention(*TENSORS, call())
    assert [record.reason for record in run.records] == [
        "density fixed by geometry",
        "static plan; density fixed by geometry",
    ]
