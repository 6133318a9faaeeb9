"""Running plans: `attend` and `sparse_attention`, opaque to torch.compile."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gossamer.call import Call, check_tensors, given_call, is_number
from gossamer.errors import PlanError, UnsupportedError, described
from gossamer.kernels import (
    AttentionOutput,
    BackwardInput,
    DifferentiableKernel,
    ReferenceKernel,
    choose_kernel,
    list_kernels,
    wants_gradients,
)
from gossamer.methods import Method, check_method
from gossamer.plan import SparsePlan
from gossamer.plan.fit import check_fit
from gossamer.plan.flat import flatten, unflatten
from gossamer.plan.validate import check_lists

_methods: dict[Method, int] = {}  # methods that compiled graphs name by number


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SparsePlan,
    *,
    scale: float | None = None,
    kernel: str = "auto",
) -> AttentionOutput:
    """Run a plan.

    Output and log-sum-exp have gradients of q, k and v, under `torch.compile` too, where the kernel
    has them; "auto" looks for one that has where a tensor requires them.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys; query head h reads KV head h // (H / Hk).
        v: [B, Hk, S, D] values.
        plan: Which keys each tile reads, with which weight.
        scale: Factor on the logits; None takes the plan's, or 1/sqrt(D).
        kernel: One of `list_kernels()`, or "auto" for the first that can.

    Returns:
        The output [B, H, N, D] in q's dtype and the log-sum-exp [B, H, N] in float32.

    Raises:
        PlanError: The plan was made for other lengths, batch or heads, or its tensors do not fit
            one another. On a CPU also: a row does not ascend, or tiles or rows name what does not
            exist; a GPU would have to wait (`plan.validate()`).
        UnsupportedError: The kernel asked for cannot run this, with its reasons.
    """
    check_tensors(q, k, v)
    check_fit(q, k, plan)
    if scale is not None and not (is_number(scale) and math.isfinite(scale)):
        raise PlanError(
            f"scale={described(scale)}: must be a finite number, or None for the plan's"
        )
    if not isinstance(kernel, str):
        known = ", ".join(["auto", *list_kernels()])
        raise UnsupportedError(f"unknown kernel {described(kernel)}: give a name, one of {known}")
    factor = plan.scale if scale is None else scale
    factor = q.shape[-1] ** -0.5 if factor is None else factor
    tensors, numbers = flatten(plan)
    gradients = wants_gradients(q, k, v)
    if gradients and (not torch.compiler.is_compiling() or _any_requires_grad(tensors)):
        chosen = choose_kernel(q, k, v, plan, kernel, gradients=True)
        if isinstance(chosen, ReferenceKernel):
            if q.device.type == "cpu":
                check_lists(plan)
            # Beyond the op: torch itself differentiates it, twice if asked to, and with respect to
            # weights and virtual keys as well. No graph takes it whole.
            return chosen.run(q, k, v, plan, factor)
        kernel = chosen.name
    out, lse = _attend_op(q, k, v, tensors, numbers, factor, kernel, gradients)
    return AttentionOutput(out, lse)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: Method,
    call: Call | None = None,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Plan and attend, without memory between calls.

    Args:
        q: [B, H, N, D] queries, after positional encoding.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        method: Decides which keys are read.
        call: The facts about the call; None for self-standing attention.
        kernel: One of `list_kernels()`, or "auto" for the first that can.

    Returns:
        [B, H, N, D] in q's dtype.

    Raises:
        PlanError: Shapes, grid, text or padding contradict one another.
        UnsupportedError: The method or the kernel cannot do this, with the reasons.
    """
    check_method(method)
    call = given_call(call)
    check_tensors(q, k, v)
    if not torch.compiler.is_compiling():
        plan = method.plan(q, k, v, call)
        return attend(q, k, v, plan, scale=call.scale, kernel=kernel).out
    grid, text = call.grid or (0, 0, 0), call.text or (-1, -1)
    numbers = [call.layer, _or(call.num_layers), call.step, _or(call.num_steps)]
    numbers += [int(call.causal), call.head_offset, _or(call.num_heads), call.seed]
    return _sparse_op(
        q,
        k,
        v,
        call.key_valid,
        [*numbers, *grid, *text, *(call.heads or ())],
        call.branch,
        call.scale,
        _number_of(method),
        kernel,
    )


def _or(number: int | None) -> int:
    """Return the number, -1 for None."""
    return -1 if number is None else number


def _number_of(method: Method) -> int:
    """Return a number under which compiled graphs find the method."""
    return _methods.setdefault(method, len(_methods))


# What torch.compiler.assume_constant_result sets; calling it would import the compiler, 1.8 s.
_number_of._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _any_requires_grad(plan: list[Tensor | None]) -> bool:
    """Return whether gradients of weights or virtual keys are asked for."""
    return any(x is not None and x.requires_grad for x in plan)


@torch.library.custom_op("gossamer::attend", mutates_args=())
def _attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor | None],
    numbers: list[int],
    scale: float,
    kernel: str,
    gradients: bool,
) -> tuple[Tensor, Tensor]:
    """Run a flattened plan; `gradients` says whether a backward pass may follow."""
    whole = unflatten(plan, numbers)
    if q.device.type == "cpu":  # on a GPU it would wait
        check_lists(whole)
    chosen = choose_kernel(q, k, v, whole, kernel, gradients=gradients)
    out, lse = chosen.run(q, k, v, whole, scale)
    return out.contiguous(), lse.contiguous()


@_attend_op.register_fake
def _attend_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor | None],
    numbers: list[int],
    scale: float,
    kernel: str,
    gradients: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs of the right shape."""
    del k, v, plan, numbers, scale, kernel, gradients
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gossamer::attend_backward", mutates_args=())
def _attend_backward_op(  # noqa: PLR0913 -- an op takes flat arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    plan: list[Tensor | None],
    numbers: list[int],
    scale: float,
    kernel: str,
    of_keys: bool,
) -> list[Tensor]:
    """Return the gradient of q, and with `of_keys` those of k and v.

    From the forward pass's output and log-sum-exp, but for the reference: it runs once more.
    """
    whole = unflatten(plan, numbers)
    chosen = choose_kernel(q, k, v, whole, kernel, gradients=True)
    if not isinstance(chosen, DifferentiableKernel):
        raise TypeError(f"kernel {chosen.name!r} names no reason against gradients and has none")
    out, lse = out.contiguous(), lse.contiguous()  # as they were made; a compiler may move them
    d_out = torch.zeros_like(out) if d_out is None else d_out
    given = BackwardInput(q, k, v, out, lse, d_out, d_lse)
    grads = chosen.backward(given, whole, scale, of_keys=of_keys)
    return [x.contiguous() for x in grads if x is not None]


@_attend_backward_op.register_fake
def _attend_backward_fake(  # noqa: PLR0913 -- mirrors the op
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    plan: list[Tensor | None],
    numbers: list[int],
    scale: float,
    kernel: str,
    of_keys: bool,
) -> list[Tensor]:
    """Return gradients of the right shape."""
    del out, lse, d_out, d_lse, plan, numbers, scale, kernel
    return [x.new_empty(x.shape) for x in ((q, k, v) if of_keys else (q,))]


def _keep_for_backward(
    ctx: Any,  # noqa: ANN401 -- torch has no type for it
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    """Keep what the backward pass is made from.

    The plan is no activation: kept as it is, it may be made in inference mode.
    """
    q, k, v, ctx.plan, ctx.numbers, ctx.scale, ctx.kernel, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any,  # noqa: ANN401
    d_out: Tensor | None,
    d_lse: Tensor | None,
) -> tuple[Tensor | list[None] | None, ...]:
    """Return the gradients of the op's arguments."""
    of_keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    plan, rest = ctx.plan, (ctx.numbers, ctx.scale, ctx.kernel, of_keys)
    grads = _attend_backward_op(*ctx.saved_tensors, d_out, d_lse, plan, *rest)
    # torch takes a list apart where all of it is tensors, and wants as many gradients back.
    of_plan = None if any(x is None for x in plan) else [None] * len(plan)
    return *(grads if of_keys else (*grads, None, None)), of_plan, None, None, None, None


_attend_op.register_autograd(_differentiate, setup_context=_keep_for_backward)


@torch.library.custom_op("gossamer::sparse_attention", mutates_args=())
def _sparse_op(  # noqa: PLR0913 -- an op takes flat arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    numbers: list[int],
    branch: str,
    scale: float | None,
    method: int,
    kernel: str,
) -> Tensor:
    """Plan and attend, for compiled graphs."""
    layer, num_layers, step, num_steps, causal, head_offset, num_heads, seed = numbers[:8]
    frames, rows, columns, start, stop, *heads = numbers[8:]
    call = Call(
        layer=layer,
        num_layers=None if num_layers < 0 else num_layers,
        step=step,
        num_steps=None if num_steps < 0 else num_steps,
        branch=branch,
        grid=(frames, rows, columns) if frames > 0 else None,
        text=(start, stop) if start >= 0 else None,
        key_valid=key_valid,
        causal=bool(causal),
        scale=scale,
        head_offset=head_offset,
        heads=tuple(heads) or None,
        num_heads=None if num_heads < 0 else num_heads,
        seed=seed,
    )
    plan = list(_methods)[method].plan(q, k, v, call)  # numbers count from 0 in order
    return attend(q, k, v, plan, scale=scale, kernel=kernel).out.contiguous()


@_sparse_op.register_fake
def _sparse_fake(  # noqa: PLR0913 -- mirrors the op
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    numbers: list[int],
    branch: str,
    scale: float | None,
    method: int,
    kernel: str,
) -> Tensor:
    """Return an output of the right shape."""
    del k, v, key_valid, numbers, branch, scale, method, kernel
    return q.new_empty(q.shape)
