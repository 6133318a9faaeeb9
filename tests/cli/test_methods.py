"""`gossamer methods`: every method of the registry, with its parameters."""

from __future__ import annotations

import json

import pytest

import gossamer as gs


def test_json_lists_every_method_in_order(run):
    result = run("methods", "--json")
    assert result.exit_code == 0
    described = json.loads(result.stdout)
    assert [each["name"] for each in described] == gs.list_methods()
    for each in described:
        params = json.loads(json.dumps(gs.get_method(each["name"]).params()))  # tuples are lists
        assert each["parameters"] == params
        assert each["summary"].endswith(".")


@pytest.mark.parametrize("name", ["svg2", "instagen", "block-topk"])
def test_one_method(run, name):
    described = json.loads(run("methods", name, "--json").stdout)
    assert described["name"] == name
    assert described["paper"]
    text = run("methods", name).stdout
    assert described["paper"] in text
    assert all(parameter in text for parameter in described["parameters"])


def test_the_table_names_methods_parameters_and_defaults(run):
    table = run("methods").stdout
    assert all(name in table for name in gs.list_methods())
    assert "exact=0.08" in table
