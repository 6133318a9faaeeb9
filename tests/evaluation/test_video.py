"""Writing mp4 files and reading them back."""

from __future__ import annotations

import errno
import struct

import pytest
import torch

from gossamer.errors import MissingExtraError
from gossamer.evaluation import video as video_module
from gossamer.evaluation.metrics import psnr
from gossamer.evaluation.video import read_video, write_video

av = pytest.importorskip("av")


def moving_square(frames=6, height=48, width=64):
    video = torch.full((frames, height, width, 3), 0.2)
    for index in range(frames):
        video[index, 8:24, 4 + 4 * index : 20 + 4 * index] = torch.tensor([0.9, 0.3, 0.1])
    return video


def test_round_trip_keeps_what_is_seen(tmp_path):
    frames = moving_square()
    write_video(tmp_path / "a.mp4", frames)
    back = read_video(tmp_path / "a.mp4")
    assert back.shape == (6, 48, 64, 3)
    # Flat areas come back within rounding of 8-bit YUV; edges of colour are halved by yuv420p.
    assert psnr(frames, back / 255.0) > 30
    assert abs(back[0, 16, 12] / 255.0 - [0.9, 0.3, 0.1]).max() < 0.02


@pytest.mark.parametrize(("height", "width"), [(47, 64), (48, 63), (47, 63), (1, 1)])
def test_odd_sides_are_padded_by_repeating_the_edge(tmp_path, height, width):
    frames = moving_square(2, height, width)
    write_video(tmp_path / "a.mp4", frames)
    back = read_video(tmp_path / "a.mp4")
    assert back.shape == (2, height + height % 2, width + width % 2, 3)
    assert psnr(frames, back[:, :height, :width] / 255.0) > 25


def test_browsers_can_play_it(tmp_path):
    write_video(tmp_path / "a.mp4", moving_square(), fps=24)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 24
        assert stream.frames == 6
        assert stream.codec_context.color_primaries == stream.codec_context.colorspace == 1
    data = (tmp_path / "a.mp4").read_bytes()
    size, kind = struct.unpack(">I4s", data[:8])
    assert kind == b"ftyp"
    # The index comes before the frames, so that playing starts before the file is loaded.
    assert data[size + 4 : size + 8] == b"moov"


def test_folders_are_made_and_old_files_replaced(tmp_path):
    path = tmp_path / "deep" / "er" / "a.mp4"
    write_video(path, moving_square(2))
    write_video(path, moving_square(3))
    assert len(read_video(path)) == 3
    assert [file.name for file in path.parent.iterdir()] == ["a.mp4"]


def test_values_outside_the_range_are_clipped(tmp_path):
    frames = torch.full((1, 16, 16, 3), 1.5)
    write_video(tmp_path / "a.mp4", frames)
    assert read_video(tmp_path / "a.mp4").min() >= 254


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros(16, 16, 3), r"\[frames, height, width, 3\]"),
        (torch.zeros(2, 16, 16, 4), r"\[frames, height, width, 3\]"),
        (torch.zeros(0, 16, 16, 3), r"\[frames, height, width, 3\]"),
        (torch.zeros(2, 16, 16, 3, dtype=torch.uint8), "uint8: divide by 255"),
        (torch.full((2, 16, 16, 3), float("nan")), "NaN"),
    ],
)
def test_what_is_no_video_is_refused_before_anything_is_written(tmp_path, frames, message):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "a.mp4", frames)
    assert not list(tmp_path.iterdir())


def test_a_failing_encoder_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.mp4"
    write_video(path, moving_square(2))
    before = path.read_bytes()

    class FullDisk:
        def __getattr__(self, name):
            return getattr(av, name)

        def open(self, name, *_, **__):
            with open(name, "wb") as file:
                file.write(b"half a video")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(video_module, "require_av", FullDisk)
    with pytest.raises(OSError, match="No space left"):
        write_video(path, moving_square(5))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_reading_what_is_no_video(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"not a video")
    with pytest.raises(ValueError, match="Invalid data"):
        read_video(tmp_path / "a.mp4")
    with pytest.raises(FileNotFoundError):
        read_video(tmp_path / "b.mp4")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(video_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r'needs av: pip install "gossamer\[eval\]"'):
        video_module.require_av()
