"""Settings that every test shares: no network, steady threads, reproducible examples."""

import os

# Before anything imports a Hugging Face library: tests use what the package bundles, never a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "ci",
    deadline=None,  # the first call of a shape pays for allocation, and CI machines are shared
    derandomize=True,  # the same examples on every run: a red run is a change, not luck
    print_blob=True,
    max_examples=40,  # many laws, two cores; the profile "search" looks further
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search", parent=settings.get_profile("ci"), derandomize=False, max_examples=500
)
# Triton's interpreter runs one program after another in numpy.
settings.register_profile(
    "interpreter",
    parent=settings.get_profile("ci"),
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores among xdist's workers, here and in what the tests start.

    Two threads for each of two workers on two cores would mostly wait for one another.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same global random state, whatever ran before it."""
    torch.manual_seed(0)
