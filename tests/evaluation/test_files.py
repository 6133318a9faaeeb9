"""Files are written whole or not at all."""

from __future__ import annotations

import errno

import pytest

from gossamer.evaluation.files import atomic_path, check_writable, read_json, write_json


def write_and_fail(path, error):
    with atomic_path(path) as scratch:
        scratch.write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_failing_write_keeps_the_old_file_and_leaves_no_scratch(tmp_path, error):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(type(error)):
        write_and_fail(path, error)
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_first_write_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="full"):
        write_and_fail(tmp_path / "a.json", OSError("full"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_no_nan_and_no_infinity(tmp_path, value):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"x": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "message"), [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[]", "holds a list")]
)
def test_reading_something_else(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.json {message}|a\.json is {message}"):
        read_json(path)


def test_a_writable_folder_is_left_as_it_was(tmp_path):
    check_writable(tmp_path / "not" / "yet")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        check_writable(tmp_path / "file" / "folder")
