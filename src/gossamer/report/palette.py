"""Colours and marker shapes of the methods, the same in the page, its plots and the README's plot.

The hues are Okabe and Ito's, told apart under every common form of colour blindness; the pale ones
are darkened on white and all are lightened on black. A shape goes with each colour, so that no
reader needs colour at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """How one method is drawn.

    Attributes:
        light: Colour on a light page.
        dark: Colour on a dark page.
        symbol: Plotly's name of the marker.
        path: The marker as an SVG path, centred at 0, about 2 units wide.
    """

    light: str
    dark: str
    symbol: str
    path: str


DENSE = Series(
    light="#3d4450",
    dark="#c9ced6",
    symbol="circle-open",
    path="M-.9 0A.9 .9 0 1 0 .9 0A.9 .9 0 1 0 -.9 0ZM-.5 0A.5 .5 0 1 1 .5 0A.5 .5 0 1 1 -.5 0Z",
)

SERIES = (
    Series(
        light="#0072b2",
        dark="#5fb3e6",
        symbol="circle",
        path="M-.9 0A.9 .9 0 1 0 .9 0A.9 .9 0 1 0 -.9 0Z",
    ),
    Series(light="#d55e00", dark="#f0863c", symbol="square", path="M-.8 -.8H.8V.8H-.8Z"),
    Series(light="#00805d", dark="#2fc79b", symbol="diamond", path="M0 -1.1L1.1 0L0 1.1L-1.1 0Z"),
    Series(light="#b0568f", dark="#e39cc6", symbol="triangle-up", path="M0 -1L1 .8H-1Z"),
    Series(light="#b07a00", dark="#f0b93a", symbol="triangle-down", path="M0 1L1 -.8H-1Z"),
    Series(
        light="#3b8fc2",
        dark="#9ad4f5",
        symbol="cross",
        path="M-.35 -1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z",
    ),
    Series(
        light="#6b5bb5",
        dark="#b3a6f0",
        symbol="hexagon",
        path="M-1 0L-.5 -.87H.5L1 0L.5 .87H-.5Z",
    ),
    Series(
        light="#8a8f00",
        dark="#d6da55",
        symbol="star",
        path="M0 -1.1L.3 -.4L1 -.3L.5 .2L.65 .9L0 .5L-.65 .9L-.5 .2L-1 -.3L-.3 -.4Z",
    ),
)


def series_of(methods: tuple[str, ...]) -> dict[str, Series]:
    """Give each method its look, in order of appearance; `dense` is always the neutral one.

    After eight methods the colours come again with other shapes.
    """
    looks = {method: DENSE for method in methods if method == "dense"}
    for position, method in enumerate(method for method in methods if method != "dense"):
        turn, colour = divmod(position, len(SERIES))
        shape = SERIES[(colour + turn) % len(SERIES)]
        looks[method] = replace(SERIES[colour], symbol=shape.symbol, path=shape.path)
    return looks
