"""Means, ranges, ratios to dense and the best values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gossamer.report import formatting
from gossamer.report.columns import COLUMNS, cells
from gossamer.report.document import Results, Run
from gossamer.report.headline import featured, headline
from gossamer.report.summary import summarise
from report.synthetic import METHODS, PROMPTS


def _results(*runs: Run) -> Results:
    return Results(
        source=Path("results.json"), runs=runs, settings={}, environment={}, recipes={}, plans=None
    )


def _run(method: str, prompt: str = "p", asked: float | None = 0.2, **measured) -> Run:
    return Run(prompt=prompt, seed=0, method=method, density_asked=asked, **measured)


def test_rows_are_dense_first_then_by_density(summary):
    assert [row.name for row in summary.rows] == [
        "dense",
        *(f"{method} at 0.15" for method in METHODS),
        *(f"{method} at 0.30" for method in METHODS),
    ]
    assert summary.prompts == PROMPTS
    assert summary.methods == ("dense", *METHODS)


def test_means_are_those_of_the_runs(results, summary):
    row = summary.rows[1]
    values = [
        run.psnr_db for run in results.runs if (run.method, run.density_asked) == ("instagen", 0.15)
    ]
    assert row.psnr_db.mean == pytest.approx(sum(values) / 2)
    assert (row.psnr_db.low, row.psnr_db.high, row.psnr_db.count) == (*sorted(values), 2)
    assert summary.dense.attention_ratio.mean == 1.0
    assert summary.dense.psnr_db is None


def test_ratios_pair_each_run_with_dense_of_its_own_case():
    summary = summarise(
        _results(
            _run("dense", "long", attention_ms=900.0),
            _run("dense", "short", attention_ms=100.0),
            _run("svg2", "long", attention_ms=450.0),
            _run("svg2", "short", attention_ms=100.0),
            _run("svg2", "no dense", attention_ms=1.0),
        )
    )
    ratio = summary.sparse[0].attention_ratio
    assert (ratio.mean, ratio.low, ratio.high, ratio.count) == (0.55, 0.5, 1.0, 2)


def test_plan_share_comes_from_the_times_or_else_from_the_record():
    runs = (_run("svg2", "a", attention_ms=200.0, plan_ms=50.0), _run("svg2", "b", plan_share=0.35))
    assert summarise(_results(*runs)).rows[0].plan_share.mean == pytest.approx(0.3)


def test_rows_that_share_a_name_are_told_apart():
    runs = (
        _run("svg2", dense_steps="0", kernel="cpu"),
        _run("svg2", dense_steps="3", kernel="cpu"),
        _run("svg2", dense_steps="3", kernel="triton"),
    )
    names = [row.name for row in summarise(_results(*runs)).rows]
    assert names == [
        "svg2 at 0.20, dense steps 0, cpu",
        "svg2 at 0.20, dense steps 3, cpu",
        "svg2 at 0.20, dense steps 3, triton",
    ]


def test_best_values_are_marked_at_each_density_among_sparse_rows_only(summary):
    titles = [column.title for column in COLUMNS]
    table = cells(summary.rows)
    psnr = [line[titles.index("PSNR, dB")].best for line in table]
    time = [line[titles.index("Attention time")].best for line in table]
    assert psnr == time == [False, True, False, False, False, True, False, False, False]
    assert not any(cell.best for line in cells(summary.rows, mark_best=False) for cell in line)


def test_a_row_without_rivals_is_not_called_best():
    summary = summarise(_results(_run("dense"), _run("svg2", psnr_db=30.0)))
    assert not any(cell.best for line in cells(summary.rows) for cell in line)


def test_infinite_and_missing_values_have_signs_of_their_own():
    summary = summarise(_results(_run("dense"), _run("svg2", psnr_db=math.inf)))
    titles = [column.title for column in COLUMNS]
    line = cells(summary.rows)[1]
    assert line[titles.index("PSNR, dB")].text == "∞"
    assert line[titles.index("SSIM")].text == "–"
    assert line[titles.index("SSIM")].sort == ""
    assert line[titles.index("Relative to dense")].text == "–"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.milliseconds(3.21), "3.2 ms"),
        (formatting.milliseconds(840.4), "840 ms"),
        (formatting.milliseconds(8000.0), "8.00 s"),
        (formatting.milliseconds(12_340.0), "12.3 s"),
        (formatting.milliseconds(900_000.0), "15.0 min"),
        (formatting.milliseconds(None), "–"),
        (formatting.density(0.15), "0.15"),
        (formatting.density(0.1234), "0.123"),
        (formatting.density(1.0), "1.00"),
        (formatting.share(0.034), "3.4 %"),
        (formatting.fixed(-1.5, 1), "−1.5"),
        (formatting.counted(1, "prompt"), "1 prompt"),
    ],
)
def test_formats(text, expected):
    assert text == expected


class TestHeadline:
    """The opening says what was measured, good or bad."""

    def test_it_states_claim_basis_and_conditions(self, results, summary):
        opening = headline(results, summary)
        assert opening.claim == (
            "instagen at density 0.15: attention takes 0.46× the dense time; "
            "PSNR 31.7 dB to the dense video"
        )
        assert opening.basis == "Means over 2 prompts, 1 seed"
        assert ("video", "96×96, 9 frames") in opening.conditions
        assert opening.conditions[0] == ("model", "tiny-wan")
        (remark,) = opening.remarks
        assert remark.startswith("Steps with full attention: 3 of 10. They count in every time")
        assert remark.endswith("the density of the whole generation to 0.504.")

    def test_slower_than_dense_is_said(self):
        results = _results(
            _run("dense", attention_ms=100.0), _run("instagen", attention_ms=130.0, psnr_db=20.0)
        )
        claim = headline(results, summarise(results)).claim
        assert "takes 1.30× the dense time, slower than dense" in claim

    def test_a_slower_whole_is_said(self):
        results = _results(
            _run("dense", attention_ms=100.0, total_ms=200.0),
            _run("svg2", attention_ms=90.0, total_ms=210.0),
        )
        remarks = headline(results, summarise(results)).remarks
        assert "The whole generation is not faster than dense, only attention is." in remarks
        assert "One video: small differences between methods may not repeat." in remarks

    def test_rivals_that_do_better_are_named(self):
        results = _results(
            _run("dense", attention_ms=100.0),
            _run("instagen", attention_ms=60.0, psnr_db=25.0),
            _run("svg2", attention_ms=50.0, psnr_db=26.0),
        )
        summary = summarise(results)
        assert featured(summary).variant.method == "instagen"
        remarks = headline(results, summary).remarks
        assert "svg2 at 0.20 is closer to dense: 26.0 dB." in remarks
        assert "svg2 at 0.20 is faster: 0.50× the dense attention time." in remarks

    def test_a_method_that_never_ran_claims_nothing_and_says_why(self):
        reasons = (("dense step", 16), ("short: 720 tokens < min_tokens=1024", 80))
        results = _results(
            _run("dense", attention_ms=100.0),
            _run("instagen", attention_ms=80.0, psnr_db=math.inf, density=1.0, reasons=reasons),
            _run("svg2", attention_ms=70.0, psnr_db=math.inf, density=1.0),
        )
        summary = summarise(results)
        opening = headline(results, summary)
        assert opening.claim == (
            "instagen at density 0.20 never ran: every call used full attention"
        )
        assert opening.figures == ()
        assert opening.remarks == (
            "80 calls: short: 720 tokens < min_tokens=1024",
            "16 calls: dense step",
        )
        assert not any(cell.best for line in cells(summary.rows) for cell in line)

    def test_without_dense_nothing_is_claimed_about_time(self):
        results = _results(_run("svg2", attention_ms=90.0))
        opening = headline(results, summarise(results))
        assert opening.claim == "svg2 at density 0.20: not compared with dense"
        assert "No dense run to compare the times with." in opening.remarks

    def test_dense_alone_claims_nothing(self):
        results = _results(_run("dense", attention_ms=90.0))
        opening = headline(results, summarise(results))
        assert opening.claim == "Full attention only: nothing to compare"
        assert opening.figures == ()
