"""Figures and masks: valid for plotly, true to the data."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from plotly.graph_objects import Figure

from gossamer.report import ReportError
from gossamer.report.document import CallRecord, Mask, read_masks, read_records
from gossamer.report.fields import Field
from gossamer.report.figures import MEASURES, heat_figure, heat_grid, quality_figure
from gossamer.report.masks import INK, encode_png, mask_uri
from gossamer.report.palette import DENSE, SERIES, series_of
from report.synthetic import LAYERS, METHODS, STEPS


def _record(layer, step, density=0.2, rel_l2=None):
    return CallRecord(layer=layer, step=step, density=density, rel_l2=rel_l2)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.key)
def test_quality_figures_are_valid_and_hold_every_method(summary, measure):
    figure = quality_figure(summary, series_of(summary.methods), measure)
    Figure(figure)  # plotly refuses unknown properties and values
    missing = {"radial"} if measure.key == "st_lpips" else set()
    assert {trace["name"] for trace in figure["data"]} == set(METHODS) - missing
    assert all(trace["x"] == sorted(trace["x"]) for trace in figure["data"])


def test_quality_points_are_the_means(summary):
    figure = quality_figure(summary, series_of(summary.methods), MEASURES[0])
    row = summary.rows[1]
    trace = figure["data"][0]
    assert (trace["x"][0], trace["y"][0]) == (row.density.mean, row.psnr_db.mean)
    assert trace["error_y"]["array"][0] == pytest.approx(row.psnr_db.high - row.psnr_db.mean)


def test_points_at_infinity_are_left_out(summary):
    spread = replace(summary.rows[1].psnr_db, mean=math.inf, high=math.inf)
    rows = (replace(summary.rows[1], psnr_db=spread),)
    assert (
        quality_figure(replace(summary, rows=rows), series_of(("instagen",)), MEASURES[0]) is None
    )


def test_heat_cells_are_means_over_calls():
    calls = [_record(0, 1, 0.2), _record(0, 1, 0.4), _record(2, 0, None), _record(2, 0, math.inf)]
    grid = heat_grid(calls, "density")
    assert grid == [[None, 0.3], [None, None], [None, None]]


def test_heat_figures_are_valid_and_blank_ones_are_none():
    grid = heat_grid([_record(layer, 0, rel_l2=0.1) for layer in range(30)], "rel_l2")
    figure = heat_figure(grid, "rel_l2", 0.5)
    Figure(figure)
    assert figure["data"][0]["zmax"] == 0.5
    assert figure["layout"]["yaxis"]["dtick"] == 3
    assert heat_figure([[None, None]], "rel_l2", 0.5) is None


def test_heat_maps_have_the_size_of_the_model(results):
    grid = heat_grid(read_records(results.runs[1].records), "density")
    assert (len(grid), len(grid[0])) == (LAYERS, STEPS)
    assert grid[0] == [1.0] * STEPS


def test_no_two_methods_look_alike():
    looks = series_of(("dense", *(f"m{i}" for i in range(22))))
    assert looks["dense"] is DENSE
    assert [looks[f"m{i}"] for i in range(8)] == list(SERIES)
    assert len({(look.light, look.symbol) for look in looks.values()}) == 23


def test_a_mask_is_drawn_one_pixel_per_cell(results):
    mask = read_masks(results.plans)[0]
    uri = mask_uri(mask)
    picture = Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))
    pixels = np.asarray(picture.convert("RGBA"))
    cells = np.array(mask.image.value["mask"])
    assert pixels.shape == (mask.rows, mask.cols, 4)
    assert (pixels[..., :3] == INK).all()
    np.testing.assert_array_equal(pixels[..., 3], np.rint(cells / cells.max() * 255))


def _mask(tmp_path, **image):
    field = Field(image, tmp_path / "plans.json", "masks[4]")
    return Mask(method="svg2", layer=0, head=0, step=0, rows=2, cols=2, density=0.5, image=field)


def test_each_mask_has_its_own_scale(tmp_path):
    faint = mask_uri(_mask(tmp_path, mask=[[0.2, 0.1], [0, 0]]))
    assert faint == mask_uri(_mask(tmp_path, mask=[[1, 0.5], [0, 0]]))
    assert faint != mask_uri(_mask(tmp_path, mask=[[0, 0], [0, 0]]))


def test_a_finished_picture_is_shown_as_it_is(tmp_path):
    png = base64.b64encode(encode_png(np.eye(2))).decode()
    assert mask_uri(_mask(tmp_path, png_base64=png)) == f"data:image/png;base64,{png}"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({}, "masks[4].mask: expected a list, got null"),
        ({"mask": [[1, 0]]}, "masks[4].mask: expected 2 rows of 2 cells"),
        ({"mask": [[1, 0], [1]]}, "masks[4].mask: expected 2 rows of 2 cells"),
        ({"mask": [[1, 0], [1, "x"]]}, 'masks[4].mask[1][1]: expected a number or null, got "x"'),
        ({"mask": [[1, 0], [1, None]]}, "masks[4].mask[1][1]: expected a number, got null"),
        ({"png_base64": "?"}, "masks[4].png_base64: not base64"),
        ({"png_base64": "R0lGODlh"}, "masks[4].png_base64: not a PNG picture"),
    ],
)
def test_garbled_masks_are_refused(tmp_path, image, message):
    with pytest.raises(ReportError) as caught:
        mask_uri(_mask(tmp_path, **image))
    assert str(caught.value) == f"{tmp_path / 'plans.json'}: {message}"
