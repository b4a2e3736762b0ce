"""Draws SVG pictures that suit a light and a dark page: the canvas of `tools/pictures.py` and `tools/architecture.py`.

One file serves both: its colours follow ``prefers-color-scheme``, and it brings its own paper, so that its text can be
read on a page of either kind. `tools/build_site.py` makes a light and a dark file of it for the theme's own switch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = {  # name: (light, dark)
    "paper": ("#fbfcfd", "#1a1d21"),
    "panel": ("#f0f3f6", "#22272d"),
    "edge": ("#cfd8e0", "#3b434c"),
    "ink": ("#17212b", "#e9edf1"),
    "soft": ("#52606d", "#a9b4bf"),
    "line": ("#75828f", "#8592a0"),
    "teal": ("#0b6e6e", "#5cc8c2"),
    "teal-pale": ("#dff1f0", "#17332f"),
    "blue": ("#2456a0", "#8fb8f5"),
    "blue-pale": ("#e4edf9", "#1d2c44"),
    "amber": ("#8f5300", "#ecb662"),
    "amber-pale": ("#fdf0da", "#3a2b12"),
    "red": ("#b3261e", "#f2938b"),
    "red-pale": ("#fbe7e5", "#40201e"),
}
DARK = "@media(prefers-color-scheme:dark)"
SANS = "system-ui,-apple-system,'Segoe UI','Noto Sans','DejaVu Sans',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
MONO_WIDTH = 0.61
"""Width of a letter of such a font, in its size"""


def themed(svg: str, dark: bool) -> str:
    """A picture that is light, or dark, whatever the reader's system prefers."""
    return svg.replace(DARK, "@media all" if dark else "@media not all")


def text_width(text: str, size: float, mono: bool = False) -> float:
    """About how wide a text is, in the widest of the fonts."""
    if mono:
        return MONO_WIDTH * size * len(text)
    narrow = sum(letter in "fijlrt.,:;'|!()[] " for letter in text)
    wide = sum(letter in "mwMW%@" or letter.isupper() for letter in text)
    return size * (0.37 * narrow + 0.80 * wide + 0.625 * (len(text) - narrow - wide))


def wrapped(text: str, size: float, width: float) -> list[str]:
    """The text in lines that are no wider than this."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@dataclass
class Drawing:
    """A picture in the making: shapes in the order in which they are drawn."""

    title: str
    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "panel",
        stroke: str = "edge",
        round_: float = 8,
    ) -> None:
        size = f'width="{width:g}" height="{height:g}" rx="{round_:g}"'
        self._add(f'<rect class="f-{fill} s-{stroke}" x="{x:g}" y="{y:g}" {size}/>')

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str) -> None:
        self._add(f'<circle class="f-{fill} s-{stroke}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 14,
        color: str = "ink",
        anchor: str = "start",
        *,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        classes = f"f-{color}" + " b" * bold + " m" * mono
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._add(f'<text class="{classes}" x="{x:g}" y="{y:g}" font-size="{size:g}"{place}>{escape(text)}</text>')

    def upright(self, x: float, y: float, text: str, size: float = 13, color: str = "soft") -> None:
        """A text that is read from below, its middle here."""
        place = f'text-anchor="middle" transform="translate({x:g} {y:g})rotate(-90)"'
        self._add(f'<text class="f-{color}" font-size="{size:g}" {place}>{escape(text)}</text>')

    def line(
        self, points: Sequence[tuple[float, float]], color: str = "line", width: float = 1.6, dashed: bool = False
    ) -> None:
        """A line through these points, its corners rounded."""
        self._add(
            f'<path class="n s-{color}" d="{_path(points)}" stroke-width="{width:g}"'
            + ' stroke-dasharray="5 4"' * dashed
            + "/>"
        )

    def polyline(self, points: Sequence[tuple[float, float]], color: str, width: float) -> None:
        """A line from point to point, as of measured values."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._add(f'<path class="n s-{color}" d="M{path}" stroke-width="{width:g}" stroke-linejoin="round"/>')

    def curve(self, points: Sequence[tuple[float, float]], color: str = "line", width: float = 1.4) -> None:
        """A smooth line downwards through these points, upright in each of them."""
        path = f"M{points[0][0]:g} {points[0][1]:g}"
        for (x, y), (u, v) in itertools.pairwise(points):
            middle = (y + v) / 2
            path += f"C{x:g} {middle:g} {u:g} {middle:g} {u:g} {v:g}"
        self._add(f'<path class="n s-{color}" d="{path}" stroke-width="{width:g}"/>')

    def arrow(
        self, points: Sequence[tuple[float, float]], color: str = "line", width: float = 1.8, dashed: bool = False
    ) -> None:
        """A line whose last piece ends in a head; that piece goes along an axis."""
        (x, y), (u, v) = points[-2], points[-1]
        across, down = (u > x) - (u < x), (v > y) - (v < y)
        self.line([*points[:-1], (u - 6 * across, v - 6 * down)], color, width, dashed)
        one = (u - 9 * across - 4.5 * down, v - 9 * down - 4.5 * across)
        two = (u - 9 * across + 4.5 * down, v - 9 * down + 4.5 * across)
        self._add(f'<path class="f-{color}" d="M{u:g} {v:g}L{one[0]:g} {one[1]:g}L{two[0]:g} {two[1]:g}Z"/>')

    def cylinder(self, x: float, y: float, width: float, height: float, fill: str, stroke: str) -> None:
        """A store on disk."""
        half, lid = width / 2, 11
        rims = [f"a{half:g} {lid} 0 0 1 {side:g} 0" for side in (width, -width)]
        body = f"M{x:g} {y + lid:g}{rims[0]}v{height - 2 * lid:g}{rims[1]}z"
        self._add(f'<path class="f-{fill} s-{stroke}" d="{body}"/>')
        self._add(f'<path class="n s-{stroke}" d="M{x:g} {y + lid:g}a{half:g} {lid} 0 0 0 {width:g} 0"/>')

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" font-family="{SANS}">'
        )
        size = f'width="{self.width - 1:g}" height="{self.height - 1:g}"'
        paper = f'<rect class="f-paper s-edge" x=".5" y=".5" {size} rx="10"/>'
        return "\n".join(
            [head, f"<title>{escape(self.title)}</title>", self._style(), paper, *self.shapes, "</svg>", ""]
        )

    def _style(self) -> str:
        used = [
            name
            for name in COLORS
            if any(f"f-{name}" in s or f"s-{name}" in s for s in [*self.shapes, "f-paper s-edge"])
        ]
        rules = [
            "".join(f".f-{name}{{fill:{COLORS[name][dark]}}}.s-{name}{{stroke:{COLORS[name][dark]}}}" for name in used)
            for dark in (0, 1)
        ]
        fonts = f".n{{fill:none}}.b{{font-weight:600}}.m{{font-family:{MONO}}}"
        return f"<style>{rules[0]}{fonts}\n{DARK}{{{rules[1]}}}</style>"

    def _add(self, shape: str) -> None:
        self.shapes.append(shape)


def _path(points: Sequence[tuple[float, float]], radius: float = 8) -> str:
    """A path through these points, whose inner corners are rounded."""
    path = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        entry, leave = _towards(corner, before, radius), _towards(corner, after, radius)
        path.append(f"L{entry[0]:g} {entry[1]:g}Q{corner[0]:g} {corner[1]:g} {leave[0]:g} {leave[1]:g}")
    return "".join([*path, f"L{points[-1][0]:g} {points[-1][1]:g}"])


def _towards(start: tuple[float, float], end: tuple[float, float], distance: float) -> tuple[float, float]:
    length = max(1e-9, ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5)
    share = min(0.5, distance / length)
    return round(start[0] + share * (end[0] - start[0]), 1), round(start[1] + share * (end[1] - start[1]), 1)
