"""Reuse over steps: anchors, the residual, branches, bounds, and what the records say."""

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer import Reuse
from oracle import attention

TENSORS = Shape(1, 2, 1, 300, 300, 16, 3).tensors()
NUM_STEPS = 10


def moving(step: int, branch: str = "cond") -> tuple[torch.Tensor, ...]:
    """Return tensors that drift slowly from step to step, another way in each branch."""
    start, end = (Shape(1, 2, 1, 300, 300, 16, s).tensors() for s in (3, 4 + len(branch)))
    return tuple(a + 0.02 * step * b for a, b in zip(start, end, strict=True))


def session(reuse: Reuse, method: gs.Method | None = None, **settings: object) -> gs.Session:
    method = gs.BlockTopK(density=0.3, block=16, tile=16) if method is None else method
    return gs.Session(gs.Recipe(method=method, reuse=reuse, **{"min_tokens": 0, **settings}))


def step_of(
    run: gs.Session, step: int, *, layer: int = 0, branch: str = "cond", **more: object
) -> torch.Tensor:
    call = gs.Call(step=step, num_steps=NUM_STEPS, layer=layer, num_layers=2, branch=branch, **more)
    return run.attention(*moving(step, branch), call)


def paths(run: gs.Session) -> list[str]:
    return [record.path for record in run.records]


def test_an_anchor_gives_full_attention_and_the_next_step_its_residual() -> None:
    run = session(Reuse(every=4))
    first, second = step_of(run, 0), step_of(run, 1)
    full = attention(*moving(0)).out
    torch.testing.assert_close(first.double(), full, rtol=1e-4, atol=1e-5)
    plan = run.recipe.method.plan(*moving(0))
    residual = full - gs.attend(*moving(0), plan, kernel="reference").out.double()
    want = gs.attend(*moving(1), plan, kernel="reference").out.double() + residual
    torch.testing.assert_close(second.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        gs.BlockTopK(density=0.3, block=16, tile=16),
        gs.SVG2(density=0.3),
        gs.InstaGen(density=0.3),
    ],
    ids=lambda method: method.name,
)
def test_the_residual_lowers_the_error_of_any_method(method: gs.Method) -> None:
    def error(residual: bool) -> float:
        run = session(Reuse(every=4, residual=residual), method)
        outs = [step_of(run, step) for step in range(4)][1:]
        exact = [attention(*moving(step)).out for step in range(1, 4)]
        return sum(float((a - b).norm() / b.norm()) for a, b in zip(outs, exact, strict=True))

    assert error(residual=True) < 0.5 * error(residual=False)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("warm_up", [0, 4])
def test_never_more_than_every_minus_one_steps_in_a_row_reuse(every: int, warm_up: int) -> None:
    run = session(Reuse(every=every), dense_steps=warm_up)
    for step in range(NUM_STEPS):
        step_of(run, step)
    first = max(warm_up - 1, 0)  # the last dense step serves as the first anchor
    want = ["reuse" if s > first and (s - first) % every else "dense" for s in range(NUM_STEPS)]
    assert paths(run) == want


def test_branches_keep_their_own_rhythm_and_state() -> None:
    """Interleaved passes give what each gives alone."""
    both = session(Reuse(every=3))
    outs = [(step_of(both, s), step_of(both, s, branch="uncond")) for s in range(5)]
    for i, branch in enumerate(("cond", "uncond")):
        alone = session(Reuse(every=3))
        for s in range(5):
            assert torch.equal(outs[s][i], step_of(alone, s, branch=branch))


def test_anchors_can_be_named() -> None:
    run = session(Reuse(anchors="3,6-7"))
    for step in range(NUM_STEPS):
        step_of(run, step)
    anchors = [r.step for r in run.records if r.path == "dense"]
    assert anchors == [0, 3, 6, 7]


def test_a_named_anchor_that_was_skipped_is_made_up_for() -> None:
    run = session(Reuse(anchors="3"))
    for step in (0, 2, 5, 6):
        step_of(run, step)
    assert paths(run) == ["dense", "reuse", "dense", "reuse"]


def test_without_residual_an_anchor_is_a_sparse_step() -> None:
    run = session(Reuse(every=2, residual=False), dense_steps=1)
    for step in range(5):
        step_of(run, step)
    assert paths(run) == ["dense", "sparse", "reuse", "sparse", "reuse"]
    assert run.records[0].reason == "dense step"


def test_records_say_which_anchor_and_count_the_work() -> None:
    run = session(Reuse(every=3), dense_steps=1)
    for step in range(3):
        step_of(run, step)
    anchor, first, second = run.records
    assert (anchor.reason, anchor.density) == ("dense step, anchor", 1.0)
    assert anchor.plan_ms > 0
    assert first.reason == second.reason == "anchor of step 0"
    assert first.density == pytest.approx(0.3, abs=0.02)
    summary = run.summary()
    assert (summary["dense_calls"], summary["reuse_calls"]) == (1, 2)
    assert summary["density"] == pytest.approx((1 + 2 * first.density) / 3)
    assert summary["reuse_peak_bytes"] >= 4 * 2 * 300 * 16


def test_a_host_backend_computes_the_anchor() -> None:
    from gossamer.session import DenseBackend

    run = session(Reuse(every=3))
    given = torch.full_like(TENSORS[0], 0.5)
    call = gs.Call(step=0)
    out = run.attention(*TENSORS, call, dense_by=DenseBackend("host", lambda: given))
    assert torch.equal(out, given)


def test_dense_layers_stay_dense() -> None:
    run = session(Reuse(every=4), dense_layers="1")
    for step in range(2):
        for layer in range(2):
            step_of(run, step, layer=layer)
    assert paths(run) == ["dense", "dense", "reuse", "dense"]
    assert run.records[1].reason == "dense layer"


def test_the_second_generation_equals_the_first() -> None:
    run = session(Reuse(every=4))
    first = [step_of(run, s) for s in range(4)]
    run.end_generation()
    assert [torch.equal(a, step_of(run, s)) for s, a in enumerate(first)] == [True] * 4
    assert len(run.records) == 4


def test_a_step_that_does_not_advance_is_planned_anew() -> None:
    """A generation that was cut off left its anchors behind."""
    run = session(Reuse(every=9))
    for step in (0, 5, 2, 3):
        step_of(run, step)
    assert paths(run) == ["dense", "reuse", "reuse", "reuse"]
    step_of(run, 0)
    assert paths(run)[-1] == "dense"


def test_another_shape_or_mask_is_planned_anew() -> None:
    run = session(Reuse(every=9))
    step_of(run, 0)
    short = [x[:, :, :200] for x in moving(1)]
    run.attention(*short, gs.Call(step=1, branch="cond"))
    valid = torch.ones(1, 200, dtype=torch.bool)
    run.attention(*short, gs.Call(step=2, branch="cond", key_valid=valid))
    assert paths(run) == ["dense"] * 3


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"key_valid": 300}, {"key_valid": 150}),
        ({"text": (0, 20), "grid": (4, 7, 10)}, {"text": (280, 300), "grid": (4, 7, 10)}),
        ({"grid": (3, 10, 10)}, {"grid": (10, 10, 3)}),
        ({"scale": 0.1}, {"scale": 1.0}),
    ],
)
def test_another_call_of_the_same_size_is_planned_anew(
    first: dict[str, object], then: dict[str, object], residual: bool
) -> None:
    """A plan of other padding would read keys that hold anything by now, NaN here."""
    run = session(Reuse(every=4, residual=residual), gs.get_method("sliding-window", density=0.3))
    q, k, v = (x.clone() for x in TENSORS)
    for step, facts in enumerate((first, then)):
        valid = facts.get("key_valid")
        if valid is not None:
            k[:, :, valid:] = v[:, :, valid:] = float("nan")
            facts = {"key_valid": torch.arange(300)[None] < valid}
        out = run.attention(q, k, v, gs.Call(step=step, num_steps=NUM_STEPS, **facts))
        assert out[:, :, : 300 if valid is None else valid].isfinite().all()
    assert "reuse" not in paths(run)
    run.attention(q, k, v, gs.Call(step=2, num_steps=NUM_STEPS, **facts))
    assert paths(run)[-1] == "reuse"


def test_memory_is_bounded_and_the_bound_is_reported() -> None:
    unbounded = session(Reuse(every=4))
    step_of(unbounded, 0)
    one = unbounded.summary()["reuse_peak_bytes"]
    run = session(Reuse(every=4, max_bytes=one))
    for step in range(2):
        for layer in range(2):
            step_of(run, step, layer=layer)
    assert paths(run) == ["dense", "sparse", "reuse", "sparse"]
    assert run.records[1].reason == f"no reuse: max_bytes={one} is used up"
    assert run.summary()["reuse_peak_bytes"] == one


def test_state_is_freed_at_the_end_of_a_generation() -> None:
    import gc
    import weakref

    run = session(Reuse(every=4))
    step_of(run, 0)
    kept = weakref.ref(run._anchors._kept[0, "cond"].residual)
    run.end_generation()
    gc.collect()
    assert kept() is None


def test_virtual_keys_follow_the_keys() -> None:
    """A centroid of the anchor's keys would be stale at the next step."""
    from dataclasses import dataclass

    from gossamer.methods import Method

    @dataclass(frozen=True, kw_only=True)
    class OneCentroid(Method):
        name = "one-centroid"

        @classmethod
        def at_density(cls, density: float) -> "OneCentroid":
            del density
            return cls()

        def _plan_latent(self, q, k, v, call, state):
            index = torch.tensor([[[[0, 300]]]]).expand(1, 1, -(-q.shape[2] // 128), -1)
            keys = gs.KeyTokens.from_lists(index)
            keys = gs.KeyTokens(
                start=keys.start,
                count=keys.count,
                index=keys.index,
                extra_k=k.mean(2, keepdim=True),
                extra_v=v.mean(2, keepdim=True),
                extra_of=torch.zeros(*k.shape[:3], dtype=torch.int32),
            )
            return gs.SparsePlan(num_queries=300, num_keys=300, tile=128, keys=keys)

    run = session(Reuse(every=4, residual=False), OneCentroid())
    step_of(run, 0)
    fresh = gs.sparse_attention(*moving(1), OneCentroid())
    torch.testing.assert_close(step_of(run, 1), fresh)


@pytest.mark.parametrize(
    "bad",
    [
        {"every": 0},
        {"every": True},
        {"every": 2.5},
        {"offload": "disk"},
        {"anchors": "x"},
        {"anchors": 3},
        {"max_bytes": -1},
        {"residual": 1},
    ],
    ids=str,
)
def test_bad_parameters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(gs.RecipeError, match=f"reuse: {next(iter(bad))}"):
        Reuse(**bad)


def test_anchors_and_their_distance_are_not_given_together() -> None:
    with pytest.raises(gs.RecipeError, match="every=5 has no effect beside anchors='1-3'"):
        Reuse(every=5, anchors="1-3")


def test_a_recipe_with_reuse_round_trips() -> None:
    for reuse in (Reuse(every=5, max_bytes=9), Reuse(offload="cpu", anchors="1-3")):
        recipe = gs.Recipe(method=gs.InstaGen(density=0.2), reuse=reuse)
        assert gs.Recipe.from_toml(recipe.to_toml()) == recipe
    with pytest.raises(gs.RecipeError, match="reuse: unknown key 'evry': did you mean 'every'"):
        gs.Recipe.from_toml('method = "dense"\n[reuse]\nevry = 3\n')
    with pytest.raises(gs.RecipeError, match=r"must be a \[reuse\] table"):
        gs.Recipe.from_toml('method = "dense"\nreuse = 3\n')


def test_exact_selection_gives_the_anchor_its_full_attention() -> None:
    """MC-Sparse computes it on the way: the dense backend is not asked again."""
    from gossamer.session import DenseBackend

    def refuse() -> torch.Tensor:
        raise AssertionError("full attention was computed twice")

    run = session(Reuse(every=3), gs.MCSparse(density=0.2))
    out = run.attention(*TENSORS, gs.Call(step=0), dense_by=DenseBackend("host", refuse))
    torch.testing.assert_close(out.double(), attention(*TENSORS).out, rtol=1e-4, atol=1e-5)
    assert paths(run) == ["dense"]


def test_an_order_is_decided_and_recorded() -> None:
    run = session(Reuse(every=2, residual=False), order=gs.WaveAlign(skip="never"))
    out, plain = step_of(run, 0), step_of(session(Reuse(every=2, residual=False)), 0)
    assert torch.equal(out, plain)
    assert run.records[0].reason == 'wavealign: skip="never"; anchor'
    run = session(Reuse(every=2, residual=False), order=gs.WaveAlign())
    step_of(run, 0)
    assert run.records[0].reason.startswith("wavealign: 300 keys: up to 98304")


def test_a_recipe_with_an_order_round_trips() -> None:
    recipe = gs.Recipe(method=gs.SVG2(density=0.2), order=gs.WaveAlign(wave=64, iters=5))
    assert gs.Recipe.from_toml(recipe.to_toml()) == recipe
    assert gs.Recipe.from_toml('method = "svg2"\norder = "wavealign"').order == gs.WaveAlign()
    with pytest.raises(gs.RecipeError, match="unknown order 'wavalign': did you mean 'wavealign'"):
        gs.Recipe.from_toml('method = "svg2"\norder = "wavalign"')
