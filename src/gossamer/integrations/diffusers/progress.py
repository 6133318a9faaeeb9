"""Where a generation stands: which pass, which step of how many, and when another one begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


class PassContext(Protocol):
    """The part of diffusers' `CacheContext` that says where the denoising loop is."""

    @property
    def name(self) -> str:
        """The pass, usually "cond" or "uncond"."""
        ...

    @property
    def step_index(self) -> int | None:
        """The step, where the pipeline tells it."""
        ...

    @property
    def num_inference_steps(self) -> int | None:
        """The number of steps, where the pipeline tells it."""
        ...


class GenerationState(Protocol):
    """The part of `Session` that holds state between calls."""

    def end_generation(self) -> None:
        """Drop the state; the records go when the next generation's first call comes."""
        ...

    def drop_state(self) -> None:
        """Drop the state and go on with the same generation and its records."""
        ...


@dataclass(frozen=True)
class Position:
    """Where one attention call stands in its generation.

    Attributes:
        branch: The pass's name, "" where the pipeline names none.
        step: Index of the denoising step, global to the generation.
        num_steps: Steps of the generation, None where nothing tells.
    """

    branch: str
    step: int
    num_steps: int | None


@dataclass
class _Pass:
    """One forward of one model: its step and the layers that it has called."""

    step: int
    layers: set[int] = field(default_factory=set[int])


class Progress:
    """Follows the generations of one pipeline (or bare model) and drops state between them.

    The step is the first of these that is known: the pass's own `step_index`; how often the
    pipeline's scheduler has moved on since `set_timesteps`; how often the pass was entered, over
    all models of the pipeline; 0 for a model called on its own. No tensor's value is read.

    A generation ends when the pipeline resets its caches or, where it was interrupted, when the
    next one is noticed: `set_timesteps` was called again, the step went back, or a pass of step 0
    came twice. State also goes whenever one forward cannot be told from another: outside any
    `cache_context`, when a pass comes twice within a step, and when another model takes over
    (Wan 2.2's second expert). A forward outside both a `cache_context` and a running pipeline is
    a generation of its own.
    """

    def __init__(self, session: GenerationState, pipeline: Any = None) -> None:
        """Start between two generations.

        Args:
            session: Whose state is dropped.
            pipeline: The pipeline whose scheduler tells the step; None for a bare model.
        """
        self._session = session
        self._pipeline = pipeline
        # set_timesteps makes a new tensor every time, so its identity names the generation.
        self._ended_timesteps: object = self._timesteps()
        self._running_timesteps: object = None
        self._scheduler_step: int | None = None
        self._scheduler_index: int | None = None
        self._forget()

    def enter(self, name: str) -> None:
        """Note that the pass called `name` begins."""
        self._observe_scheduler()
        self._entries[name] = self._entries.get(name, -1) + 1

    def end(self) -> None:
        """Note that the generation has ended."""
        self._ended_timesteps = self._timesteps()
        self._running_timesteps = None
        self._scheduler_step = None
        self._begin_generation()

    def locate(self, model: int, layer: int, context: PassContext | None) -> Position:
        """Return where the call of a layer stands, dropping first what state is not its own.

        Args:
            model: Which of the pipeline's models makes the call.
            layer: The layer's index in that model.
            context: The pass it belongs to, None where none is named.
        """
        self._observe_scheduler()
        branch = "" if context is None else context.name
        told = self._told_step(context)
        step = self._entries.get(branch, 0) if told is None else told
        before = self._passes.get((model, branch))
        repeated = before is not None and before.step == step and layer in before.layers
        if repeated and told is None and context is not None:
            step += 1  # a second forward under one cache_context is the next step
            self._entries[branch] = step
            repeated = False
        fresh = repeated or before is None or before.step != step
        switched = self._model not in (None, model)
        if self._starts_over(context, told, repeated, switched):
            self._begin_generation()
        elif repeated or switched or (fresh and context is None and self._model is not None):
            self._session.drop_state()
        if fresh:
            self._passes.pop((model, branch), None)
        self._passes.setdefault((model, branch), _Pass(step)).layers.add(layer)
        self._model, self._step = model, told
        return self._position(branch, step, context)

    def _starts_over(
        self, context: PassContext | None, told: int | None, repeated: bool, switched: bool
    ) -> bool:
        """Tell whether a call can only be another generation's."""
        if told is None:
            return context is None and (repeated or switched)
        went_back = self._step is not None and told < self._step
        # A running pipeline that starts over is noticed by its timesteps.
        begun_twice = repeated and told == 0 and context is not None
        return went_back or (begun_twice and self._running_timesteps is None)

    def _position(self, branch: str, step: int, context: PassContext | None) -> Position:
        """Complete a step with the number of steps, as far as anything tells it."""
        if context is not None and context.num_inference_steps is not None:
            num_steps: int | None = context.num_inference_steps
        elif self._running_timesteps is not None:
            num_steps = getattr(self._pipeline, "num_timesteps", None)
            num_steps = len(self._pipeline.scheduler.timesteps) if num_steps is None else num_steps
        else:
            num_steps = 1 if context is None else None
        if num_steps is not None and (context is None or context.step_index is None):
            step = min(step, num_steps - 1)  # counted: a pipeline may call on past its last step
        return Position(branch, step, num_steps)

    def _told_step(self, context: PassContext | None) -> int | None:
        """Return the step that the pass or the scheduler tells, None where neither does."""
        if context is not None and context.step_index is not None:
            return context.step_index
        return self._scheduler_step

    def _observe_scheduler(self) -> None:
        """Count how often the scheduler of a running pipeline has moved on.

        Its `step_index` itself may start anywhere (video-to-video skips the first steps).
        """
        timesteps = self._timesteps()
        if timesteps is None or timesteps is self._ended_timesteps:
            return
        index = getattr(self._pipeline.scheduler, "step_index", -1)  # None before the first step
        if timesteps is not self._running_timesteps:
            if self._running_timesteps is not None:
                self._begin_generation()
            self._running_timesteps = timesteps
            self._scheduler_step = None if index == -1 else 0
        elif self._scheduler_step is not None and index != self._scheduler_index:
            self._scheduler_step += 1
        self._scheduler_index = index

    def _timesteps(self) -> object:
        """Return the scheduler's present list of timesteps, None for a bare model."""
        return getattr(getattr(self._pipeline, "scheduler", None), "timesteps", None)

    def _begin_generation(self) -> None:
        """Let the session forget, and count from the start."""
        self._session.end_generation()
        self._forget()

    def _forget(self) -> None:
        self._entries: dict[str, int] = {}
        self._passes: dict[tuple[int, str], _Pass] = {}
        self._model: int | None = None
        self._step: int | None = None
