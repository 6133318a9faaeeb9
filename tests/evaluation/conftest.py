"""What the tests of the harness share."""

from __future__ import annotations

import pytest
import torch

import gossamer as gs
from evaluation.fake_pipeline import FakePipeline, apply_fake, topk
from gossamer.evaluation.settings import Settings
from gossamer.evaluation.variants import dense_variant


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    """A fake pipeline that `gossamer.apply` knows how to attach to."""
    monkeypatch.setattr(gs, "apply", apply_fake)
    return FakePipeline()


@pytest.fixture
def settings() -> Settings:
    return Settings(model="fake", height=32, width=32, num_frames=4, steps=4, guidance_scale=3.0)


@pytest.fixture
def variants():
    return [dense_variant(), topk(0.3)]


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tensors of a few kilobytes are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
