"""The cases that kernels are timed on, by the names their results carry."""

from __future__ import annotations

import gossamer as gs
from gossamer.evaluation.bench.case import Case
from gossamer.evaluation.bench.clustered_masks import ClusteredMasks
from gossamer.evaluation.bench.intra_layers import IntraLayers
from gossamer.evaluation.bench.random_rows import RandomRows


def _sequences(groups: int, *, causal: bool) -> tuple[IntraLayers, ...]:
    """Return Scatter, and Gather 1 beside it, on sequences in the shape of LLaMA-8B's layers."""
    method = gs.Intra(groups=groups, neighbourhood="strided", gather="segment")
    return tuple(
        IntraLayers(
            name=f"intra{groups}-{length}{'-causal' * causal}",
            method=method,
            heads=32,
            kv_heads=8,
            dim=128,
            num_tokens=length,
            causal=causal,
        )
        for length in (16_384, 32_768, 65_536)
    )


def _flux(name: str, method: gs.Intra) -> IntraLayers:
    """Return an image of 2048 x 2048 pixels behind 512 text tokens, in the shape of FLUX's layers.

    A latent token stands for 16 x 16 pixels; FLUX.1 has 19 double-stream and 38 single-stream
    layers.
    """
    return IntraLayers(
        name=name,
        method=method,
        heads=24,
        kv_heads=24,
        dim=128,
        num_tokens=128 * 128 + 512,
        grid=(1, 128, 128),
        text=512,
        num_layers=57,
    )


CASES: tuple[Case, ...] = (
    RandomRows(name="tokens-75600", kind="tokens", num_tokens=75_600, heads=12, dim=128),
    RandomRows(
        name="tokens-75600-weighted",
        kind="tokens",
        num_tokens=75_600,
        heads=12,
        dim=128,
        weighted=True,
    ),
    RandomRows(name="tokens-32760", kind="tokens", num_tokens=32_760, heads=12, dim=128),
    RandomRows(name="tokens-32768-d64", kind="tokens", num_tokens=32_768, heads=16, dim=64),
    RandomRows(name="blocks-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128),
    RandomRows(
        name="blocks64-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128, block=64
    ),
    RandomRows(
        name="blocks32-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128, block=32
    ),
    RandomRows(
        name="blocks16-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128, block=16
    ),
    RandomRows(name="blocks-32760", kind="blocks", num_tokens=32_760, heads=12, dim=128),
    RandomRows(
        name="blocks-75600-full", kind="blocks", num_tokens=75_600, heads=12, dim=128, density=1.0
    ),
    RandomRows(
        name="blocks-32760-full", kind="blocks", num_tokens=32_760, heads=12, dim=128, density=1.0
    ),
    *_sequences(8, causal=True),
    *_sequences(8, causal=False),
    _flux("intra8-flux2k", gs.Intra(groups=8)),
    # Patches of 8 x 8 queries fill half a tile; of 8 x 16 a whole one, on the same windows.
    _flux("intra8-flux2k-wide", gs.Intra(groups=8, query_patch=(4, 8, 16))),
    IntraLayers(
        name="intra-g2s4-65536-causal",
        method=gs.Intra(schedule="g2s4"),
        heads=32,
        kv_heads=8,
        dim=128,
        num_tokens=65_536,
        causal=True,
        num_layers=32,
    ),
    ClusteredMasks(name="clustered-148k", num_tokens=148_480),
    ClusteredMasks(name="clustered-364k", num_tokens=364_544),
)
"""Every case, in the order in which it runs."""
