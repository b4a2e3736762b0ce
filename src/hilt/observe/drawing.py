"""Charts, drawn once for two canvases: SVG for a page, and pixels for a PNG file."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import numpy as np

from hilt.core.errors import optional_module
from hilt.core.tree import Array

PALETTE = ["2f6fde", "e8772e", "1f9e77", "8b5cd6", "d1495b", "0e94a8", "a67c12", "6b7280"]
SHADES = {"ink": "1f2430", "faint": "6b7280", "grid": "e6e7ea", "paper": "ffffff"}
DASHES: list[tuple[float, ...]] = [(), (6, 4), (2, 3), (9, 3, 2, 3), (14, 4), (9, 3, 2, 3, 2, 3), (1, 6), (4, 2, 4, 8)]
"""Lengths in pixels, drawn and left out in turn. A curve's number counts on from
the first when there are more curves."""
WIDTH, HEIGHT = 480.0, 290.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 18.0, 58.0, 42.0
"""Of a chart, in pixels: its size, and what lies around the curves"""
SCALE = 3
"""The factor by which pixels are drawn larger before they are reduced by two: lines are smooth, and letters sharp"""
Color = int | str


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    x: Array
    y: Array
    color: int = 0
    dash: int = 0
    low: Array | None = None
    high: Array | None = None
    """A band around it, or the intervals of its dots"""
    dots: bool = False
    """Points on their own, that are not joined"""
    whose: str = ""
    """The name of the run, shown when the curve is pointed at"""


@dataclass(frozen=True)
class Chart:
    """What is drawn in one frame."""

    title: str
    unit: str
    x_label: str
    lines: Sequence[Line]
    percent: bool = False
    """Values are shares, shown from 0 to 100%"""


class Canvas(Protocol):
    """What a chart is drawn on; (0, 0) is its left upper corner."""

    def line(self, points: Array, color: Color, width: float, dash: Sequence[float] = ()) -> None: ...
    def area(self, points: Array, color: Color) -> None: ...
    def dot(self, x: float, y: float, color: Color) -> None: ...
    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        anchor: str = "start",
        color: Color = "ink",
        bold: bool = False,
    ) -> float: ...


def draw(chart: Chart, on: Canvas) -> tuple[float, float, float, float]:
    """Draws a chart, and gives the ranges of its axes."""
    x_low, x_high, y_low, y_high = axes(chart)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: Array, y: Array) -> Array:
        inside = np.clip(y, y_low, y_high)
        return np.stack(
            [LEFT + (x - x_low) / (x_high - x_low) * wide, TOP + (y_high - inside) / (y_high - y_low) * high], -1
        )

    on.text(LEFT - 44, 20, chart.title, 15, bold=True)
    for tick in ticks(y_low, y_high, 5):
        ends = place(np.array([x_low, x_high]), np.array([tick, tick]))
        on.line(ends, "grid", 1)
        on.text(LEFT - 8, ends[0, 1] + 4, f"{100 * tick:.0f}%" if chart.percent else short(tick), 11, "end", "faint")
    for tick in ticks(x_low, x_high, 6):
        on.text(
            float(place(np.array([tick]), np.array([y_low]))[0, 0]),
            HEIGHT - BOTTOM + 17,
            short(tick),
            11,
            "middle",
            "faint",
        )
    on.text(LEFT + wide / 2, HEIGHT - 8, chart.x_label, 11, "middle", "faint")
    right = LEFT - 44 + on.text(LEFT - 44, 40, chart.unit, 11, color="faint") + 14
    for line in chart.lines:
        if line.low is not None and line.high is not None and not line.dots and len(line.x) > 1:
            on.area(np.concatenate([place(line.x, line.low), place(line.x, line.high)[::-1]]), line.color)
    below = 0.0
    for name, line in {line.name: line for line in chart.lines if line.name}.items():
        color = line.color if len({other.color for other in chart.lines if other.name == name}) == 1 else "faint"
        if right + 23 + 6 * len(name) > WIDTH and not below:  # about as wide as it will be
            right, below = LEFT, 13.0  # beside the numbers of the axis
        if line.dots:
            on.dot(right + 9, 36 + below, color)
        else:
            on.line(np.array([[right, 36 + below], [right + 18, 36 + below]]), color, 2.2, dash_of(line))
        right += 23 + on.text(right + 23, 40 + below, name, 11) + 12
    for line in chart.lines:
        points = place(line.x, line.y)
        if line.dots or len(points) == 1:
            for number, (x, y) in enumerate(points):
                if line.low is not None and line.high is not None:
                    bounds = place(np.repeat(line.x[number], 2), np.array([line.low[number], line.high[number]]))
                    on.line(bounds, line.color, 1.4)
                on.dot(x, y, line.color)
        else:
            on.line(points, line.color, 1.8, dash_of(line))
    return x_low, x_high, y_low, y_high


def dash_of(line: Line) -> tuple[float, ...]:
    return DASHES[line.dash % len(DASHES)]


def axes(chart: Chart) -> tuple[float, float, float, float]:
    """The least and the most that is shown of x and of y. A few values that lie far
    out do not press the others flat."""
    x = np.concatenate([line.x for line in chart.lines])
    x_high = float(x.max()) or 1.0
    x_low = float(x.min()) if 0.5 * x_high < x.min() < x_high else 0.0
    if chart.percent:
        return x_low, x_high, 0.0, 1.0
    y = np.concatenate([side for line in chart.lines for side in (line.y, line.low, line.high) if side is not None])
    low, high = float(y.min()), float(y.max())
    inner_low, inner_high = np.quantile(y, [0.01, 0.99])
    if high - low > 3 * (inner_high - inner_low) > 0:
        low, high = float(inner_low), float(inner_high)
    if 0 <= low < 0.5 * high:
        low = 0.0
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return x_low, x_high, low - room * (low != 0), high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns round numbers between two, about this number of them."""
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """``12k``, ``0.004``, ``-3``"""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


class Svg:
    """A chart as text for a page, whose style gives the colors; the curves are
    included as data, to show values at the pointer."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def line(self, points: Array, color: Color, width: float, dash: Sequence[float] = ()) -> None:
        dashes = f' stroke-dasharray="{" ".join(map(str, dash))}"' if dash else ""
        self._parts.append(
            f'<polyline points="{_joined(points)}" style="stroke:var(--{_name(color)})" '
            f'stroke-width="{width}"{dashes}/>'
        )

    def area(self, points: Array, color: Color) -> None:
        self._parts.append(f'<polygon points="{_joined(points)}" style="fill:var(--{_name(color)})" opacity=".16"/>')

    def dot(self, x: float, y: float, color: Color) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" style="fill:var(--{_name(color)})"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        anchor: str = "start",
        color: Color = "ink",
        bold: bool = False,
    ) -> float:
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{size}" text-anchor="{anchor}"{weight} style="fill:var(--{_name(color)})"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>')
        return 0.62 * size * len(text)

    def chart(self, chart: Chart) -> str:
        x_low, x_high, y_low, y_high = draw(chart, self)
        lines = [
            {
                "name": ": ".join(filter(None, (line.whose, line.name))),
                "color": _name(line.color),
                "x": _rounded(line.x),
                "y": _rounded(line.y),
            }
            for line in chart.lines
        ]
        data = {"axes": [x_low, x_high, y_low, y_high], "percent": chart.percent, "x": chart.x_label, "lines": lines}
        facts = html.escape(json.dumps(data, separators=(",", ":")))
        box, label = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", html.escape(chart.title)
        head = f'<svg class="chart" viewBox="{box}" role="img" aria-label="{label}" data-chart="{facts}">'
        return head + "".join(self._parts) + "</svg>"


class Pixels:
    """Charts as a picture, beside and below each other, under a title."""

    def __init__(self, columns: int, rows: int, head: float):
        self._image, self._draw, self._font = (
            optional_module(f"PIL.{part}", "A PNG of curves", "images", "pillow") for part in PARTS
        )
        size = (round(columns * WIDTH * SCALE), round((head + rows * HEIGHT) * SCALE))
        self._picture = self._image.new("RGB", size, _rgb("paper"))
        self._on = self._draw.Draw(self._picture, "RGBA")
        self._fonts: dict[float, Any] = {}
        self.corner = (0.0, 0.0)
        """Where (0, 0) is"""

    def line(self, points: Array, color: Color, width: float, dash: Sequence[float] = ()) -> None:
        for part in _dashed(points, dash):
            self._on.line([tuple(point) for point in self._at(part)], _rgb(color), round(width * SCALE), joint="curve")

    def area(self, points: Array, color: Color) -> None:
        self._on.polygon([tuple(point) for point in self._at(points)], (*_rgb(color), 40))

    def dot(self, x: float, y: float, color: Color) -> None:
        (x, y), radius = self._at(np.array([x, y])), 3.4 * SCALE
        self._on.ellipse((x - radius, y - radius, x + radius, y + radius), _rgb(color))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        anchor: str = "start",
        color: Color = "ink",
        bold: bool = False,
    ) -> float:
        if size not in self._fonts:
            self._fonts[size] = self._font.load_default(size * SCALE)
        font = self._fonts[size]
        place = tuple(self._at(np.array([x, y])))
        side = {"start": "l", "middle": "m", "end": "r"}[anchor] + "s"
        self._on.text(place, text, _rgb(color), font, anchor=side, stroke_width=SCALE / 6 if bold else 0)
        return float(self._on.textlength(text, font)) / SCALE

    def png(self) -> bytes:
        file = BytesIO()
        self._picture.reduce(2).save(file, "PNG", compress_level=4)
        return file.getvalue()

    def _at(self, points: Array) -> Any:
        return (points + np.array(self.corner)) * SCALE


PARTS = ("Image", "ImageDraw", "ImageFont")


def _dashed(points: Array, dash: Sequence[float]) -> list[Array]:
    """The parts of a curve that a dash pattern leaves."""
    if not dash or len(points) < 2:
        return [points]
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    x, y = points.T
    parts, begin, number = [], 0.0, 0
    while begin < along[-1]:
        end = min(begin + dash[number % len(dash)], along[-1])
        if number % 2 == 0:
            at = np.concatenate([[begin], along[(along > begin) & (along < end)], [end]])
            parts.append(np.stack([np.interp(at, along, x), np.interp(at, along, y)], -1))
        begin, number = end, number + 1
    return parts


def _name(color: Color) -> str:
    return color if isinstance(color, str) else f"c{color % len(PALETTE)}"


def _rgb(color: Color) -> tuple[int, int, int]:
    code = SHADES[color] if isinstance(color, str) else PALETTE[color % len(PALETTE)]
    return int(code[:2], 16), int(code[2:4], 16), int(code[4:], 16)


def _joined(points: Array) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
