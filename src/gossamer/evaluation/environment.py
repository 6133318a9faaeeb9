"""Where a measurement was made: versions, machine, device and commit, for the result file."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import gossamer as gs


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Describe this process and `device`.

    Args:
        device: The device that the measured model lies on.

    Returns:
        `gossamer`, `torch`, `diffusers` (version or None), `python`, `platform`, `cpu`, `threads`,
        `device`, `commit` (None outside a checkout) and `date` (UTC, ISO 8601).
    """
    return {
        "gossamer": gs.__version__,
        "torch": torch.__version__,
        "diffusers": package_version("diffusers"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "device": device_name(torch.device(device)),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def package_version(name: str) -> str | None:
    """Return the installed version of a package, None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Return the device as a reader knows it: "cpu", or a GPU's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def cpu_name() -> str:
    """Return the processor's product name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, None if it is no checkout."""
    package = Path(__file__).resolve().parents[1]
    if not any((folder / ".git").exists() for folder in package.parents[:2]):
        return None  # an installed wheel: the version says it all
    command = ["git", "-C", str(package), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
