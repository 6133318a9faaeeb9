"""`gossamer doctor`: what is installed, what could run here, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import gossamer as gs
from gossamer import models
from gossamer.cli.console import print_facts, print_json, print_table
from gossamer.cli.model import BUNDLED
from gossamer.cli.options import Json
from gossamer.evaluation.environment import environment, package_version

# The packages of each extra, as pyproject.toml lists them (a test compares the two).
EXTRAS: Mapping[str, Sequence[str]] = {
    "diffusers": ("diffusers", "transformers", "accelerate", "sentencepiece", "ftfy"),
    "llm": ("transformers",),
    "lora": ("peft",),
    "report": ("jinja2", "plotly", "av", "pillow"),
    "eval": ("stlpips-pytorch", "av"),
    "gpu": ("triton",),
    "hopper": ("flash-attn-4", "nvidia-cutlass-dsl"),
}


def doctor(*, json: Json = False) -> None:
    """Show what is installed here, what can run and what is missing.

    Example: gossamer doctor
    """
    report = examine()
    if json:
        print_json(report)
        return
    print_facts({name: str(value) for name, value in report["environment"].items()})
    print_table(
        ("extra", "state", "install"),
        [
            (name, _state(extra), "" if not extra["missing"] else extra["install"])
            for name, extra in report["extras"].items()
        ],
        title="Extras",
    )
    print_table(
        ("kernel", "runs here", "why not"),
        [
            (name, "no" if reasons else "yes", "; ".join(reasons))
            for name, reasons in report["kernels"].items()
        ],
        title=f"Kernels ({report['kernel_dtype']}, 256 tokens, on this device)",
    )
    model = report["models"][BUNDLED]
    print_facts(
        {
            "recipes": ", ".join(report["recipes"]) or "none found",
            f"model {BUNDLED}": "found" if model["found"] else "missing: reinstall gossamer",
        }
    )


def examine() -> dict[str, Any]:
    """Collect what `doctor` shows, as JSON-able values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = models.tiny_wan_path()
    return {
        "environment": environment(device),
        "extras": {name: _extra(name, packages) for name, packages in EXTRAS.items()},
        "kernels": _kernels(device),
        "kernel_dtype": str(_dtype(device)).removeprefix("torch."),
        "recipes": gs.list_recipes(),
        "models": {BUNDLED: {"found": (folder / "model_index.json").is_file()}},
    }


def _extra(name: str, packages: Sequence[str]) -> dict[str, Any]:
    versions = {package: package_version(package) for package in packages}
    return {
        "present": {package: version for package, version in versions.items() if version},
        "missing": [package for package, version in versions.items() if not version],
        "install": f'pip install "gossamer[{name}]"',
    }


def _dtype(device: str) -> torch.dtype:
    """Return the dtype in which models run on a device."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def _kernels(device: str) -> dict[str, list[str]]:
    """Return every kernel with the reasons why it cannot run a small sparse plan here."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, 256, 64)
    q, k, v = (torch.randn(shape, generator=generator).to(device, _dtype(device)) for _ in "qkv")
    plan = gs.get_method("block-topk", density=0.5).plan(q, k, v, gs.Call())
    return {name: list(reasons) for name, reasons in gs.explain_kernels(q, k, v, plan).items()}


def _state(extra: Mapping[str, Any]) -> str:
    missing = extra["missing"]
    return f"missing {', '.join(missing)}" if missing else "installed"
