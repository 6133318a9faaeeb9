"""From `--model`, `--device` and the size options to a loaded pipeline and checked settings."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gossamer import models
from gossamer.cli.console import quiet_libraries, say
from gossamer.cli.errors import UsageError
from gossamer.evaluation.files import read_json
from gossamer.evaluation.generation import Pipeline
from gossamer.evaluation.pipelines import check_size, load_pipeline, model_digest
from gossamer.evaluation.settings import Settings
from gossamer.evaluation.variants import unknown_name

BUNDLED = "tiny-wan"

# Our word for each setting, and the pipeline's.
_PIPELINE_WORDS = {
    "height": "height",
    "width": "width",
    "num_frames": "num_frames",
    "steps": "num_inference_steps",
    "guidance_scale": "guidance_scale",
}


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that was asked for and is there.

    Attributes:
        name: What reports call it.
        folder: The pipeline's folder.
    """

    name: str
    folder: Path

    @property
    def is_bundled(self) -> bool:
        """Whether this is the model that ships with the library, with its small vocabulary."""
        return self.name == BUNDLED

    def load(self, device: str) -> Pipeline:
        """Load the pipeline, quietly."""
        with quiet_libraries():
            return load_pipeline(self.folder, device=device)

    def settings(self, pipe: Pipeline, given: Mapping[str, float | None]) -> Settings:
        """Complete the given settings with the model's own, and check them against the model.

        Args:
            pipe: The loaded pipeline.
            given: height, width, num_frames, steps and guidance_scale; None where not given.

        Raises:
            ValueError: A number is no size, or none that this model can generate.
        """
        chosen: dict[str, Any] = dict(self._defaults(pipe))
        chosen.update({name: value for name, value in given.items() if value is not None})
        settings = Settings(
            model=self.name,
            model_digest=model_digest(self.folder),
            dtype=str(getattr(pipe, "dtype", "")).removeprefix("torch."),
            **chosen,
        )
        check_size(pipe, settings)
        return settings

    def check_prompts(self, prompts: Iterable[str]) -> None:
        """Refuse words that the bundled model was never shown.

        Raises:
            UsageError: An empty prompt, or unknown words; the message lists them with an example.
        """
        prompts = list(prompts)
        if not all(prompt.strip() for prompt in prompts):
            raise UsageError("a prompt is empty")
        if not self.is_bundled:
            return
        unknown = [word for prompt in prompts for word in models.unknown_words(prompt)]
        if unknown:
            words = ", ".join(repr(word) for word in dict.fromkeys(unknown))
            examples = models.example_prompts()
            known = sorted({word for text in examples for word in re.findall(r"\w+", text.lower())})
            raise UsageError(
                f"{BUNDLED} does not know {words}: it knows few words ({' '.join(known)}); "
                f"for example {examples[0]!r}"
            )

    def _defaults(self, pipe: Pipeline) -> dict[str, Any]:
        """Return the folder's own defaults, or else those in the pipeline's signature."""
        path = self.folder / "prompts.json"
        if path.is_file():
            defaults: dict[str, Any] = read_json(path)["defaults"]
            ours = {word: name for name, word in _PIPELINE_WORDS.items()}
            return {ours.get(word, word): value for word, value in defaults.items()}
        parameters = inspect.signature(pipe.__call__).parameters
        missing = [word for word in _PIPELINE_WORDS.values() if word not in parameters]
        if missing:
            raise UsageError(f"{self.folder} is no text-to-video pipeline: no {', '.join(missing)}")
        return {name: parameters[word].default for name, word in _PIPELINE_WORDS.items()}


def choose_model(text: str) -> ModelChoice:
    """Find the model that `--model` names.

    Raises:
        UsageError: It is neither the bundled model's name nor a folder.
    """
    if text == BUNDLED:
        return ModelChoice(BUNDLED, models.tiny_wan_path())
    folder = Path(text)
    if not folder.is_dir():
        raise UsageError(f"{unknown_name('model', text, [BUNDLED])}, and no such folder is there")
    return ModelChoice(folder.resolve().name, folder)


def choose_device(text: str | None, threads: int | None) -> str:
    """Return the device to use, and set the number of CPU threads.

    Raises:
        UsageError: torch does not know the device, or the machine does not have it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if text is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises both for devices it lacks
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {text}: {reason}; use --device cpu") from error
    return text


def warn_if_busy(device: str) -> None:
    """Say so where other programs keep the cores busy, as the times will not mean much.

    OpenMP's threads spin while they wait for each other. On a busy machine they spin against the
    very thread they wait for: measured 10 to 60 times slower on 2 shared cores, and 1.2 times with
    the passive policy.
    """
    cores = os.cpu_count() or 1
    if device != "cpu" or not hasattr(os, "getloadavg") or "OMP_WAIT_POLICY" in os.environ:
        return
    load = os.getloadavg()[0]
    if load > 1.5 * cores:
        say(
            f"note: the machine is busy (load {load:.1f} on {cores} cores), so times will be "
            "unsteady; OMP_WAIT_POLICY=PASSIVE in the environment keeps threads from spinning"
        )
