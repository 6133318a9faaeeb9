"""Compare all methods on the attention of a real model, at equal density.

Captures queries, keys and values from a dense generation through an observer, then runs every
method on the same tensors. This is the error of single calls; `gossamer compare` measures videos.
"""

import torch
from diffusers import WanPipeline

import gossamer as gs
from gossamer.models import example_prompts, tiny_wan_path
from gossamer.session import AttentionEvent

DENSITIES = (0.1, 0.2, 0.4)
LAYERS = (1, 4, 7)


def capture() -> list[AttentionEvent]:
    """Generate densely and keep the calls of a few layers at the third step."""
    events: list[AttentionEvent] = []

    def keep(event: AttentionEvent) -> None:
        call = event.call
        if call.layer in LAYERS and call.step == 2 and call.branch == "cond":
            events.append(event)

    pipe = WanPipeline.from_pretrained(tiny_wan_path())
    with gs.apply(pipe, gs.Dense(), observer=keep):
        pipe(
            example_prompts()[0],
            height=96,
            width=128,
            num_frames=29,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    return events


def error(event: AttentionEvent, method: gs.Method) -> tuple[float, float]:
    """Return the density and the relative L2 error of a method on a captured call."""
    plan = method.plan(event.q, event.k, event.v, event.call)
    out = gs.attend(event.q, event.k, event.v, plan).out
    return plan.density, float((out - event.out).norm() / event.out.norm())


def main() -> None:
    """Print the mean error of each method at each density."""
    events = capture()
    print(f"{len(events)} calls of {events[0].record.num_queries} tokens; mean relative L2 error")
    for name in gs.list_methods():
        if name == "dense":
            continue
        cells: list[str] = []
        for density in DENSITIES:
            results = [error(event, gs.get_method(name, density=density)) for event in events]
            realised, loss = torch.tensor(results).mean(dim=0).tolist()
            cells.append(f"{loss:.4f} at {realised:.3f}")
        print(f"{name:12}", "   ".join(cells))


if __name__ == "__main__":
    main()
