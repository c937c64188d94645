"""Charts as inline SVG: axes with ticks, lines, bands and bars that carry their figures as tooltips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from edgefl.experiment.report.html import Markup
from edgefl.experiment.report.units import PLAIN, Scale, plain

# Mid-tones that keep apart on white and on near-black (after Tableau 10).
PALETTE = (
    "#4c84c4", "#f0892b", "#3fa66b", "#dc5356", "#9673c9",
    "#d4a91e", "#2fa5b0", "#c66a9b", "#8f7057", "#83888f",
)  # fmt: skip
COMPUTE, SEND, NEUTRAL = PALETTE[0], PALETTE[1], "#9aa0a833"
Point = tuple[float, float]


def colour(index: int, of: int = 10) -> str:
    """The colour of category `index`; more than ten categories go round the colour wheel."""
    return PALETTE[index] if of <= len(PALETTE) else f"hsl({360 * index // of},55%,55%)"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values (steps of 1, 2 or 5 times a power of ten) inside [low, high].

    >>> ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def bounds(values: Iterable[float], *, zero: bool = False) -> Point:
    """The range of an axis: that of `values`, never empty; from zero where asked for."""
    found = list(values) or [0.0]
    low, high = min(found), max(found)
    if zero:
        low = min(low, 0.0)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def span(values: Iterable[float]) -> Point:
    """The range of a metric's axis: 0 to 1 for shares that use most of it, else the values' own, wider."""
    low, high = bounds(values)
    if low >= 0 and high <= 1 and high > 0.4:
        return 0.0, 1.0
    margin = 0.05 * (high - low)
    return (low - margin if low < 0 else max(0.0, low - margin)), high + margin


class Chart:
    """A drawing with an x and a y axis, in the coordinates of its data.

    x, y: (low, high) of the axes. x_scale, y_scale: how their ticks are written. Without y_ticks: rows.
    """

    def __init__(
        self,
        label: str,
        x: Point,
        y: Point,
        *,
        width: int = 560,
        height: int = 300,
        left: int = 52,
        x_title: str = "",
        x_scale: Scale = PLAIN,
        y_scale: Scale = PLAIN,
        y_ticks: bool = True,
        x_ticks: bool = True,
    ) -> None:
        self._label, self._size = label, (width, height)
        self._x, self._y = x, y
        self.left, self.right, self.top = left, width - 14, 12
        self.bottom = height - (40 if x_title else 22)
        self.parts: list[str] = []
        self._axes(x_scale, y_scale, x_title, y_ticks, x_ticks)

    def px(self, x: float) -> float:
        return self.left + (x - self._x[0]) / (self._x[1] - self._x[0]) * (self.right - self.left)

    def py(self, y: float) -> float:
        return self.bottom - (y - self._y[0]) / (self._y[1] - self._y[0]) * (self.bottom - self.top)

    def _axes(self, x_scale: Scale, y_scale: Scale, title: str, y_ticks: bool, x_ticks: bool) -> None:
        if y_ticks:
            for value in ticks(self._y[0] / y_scale.factor, self._y[1] / y_scale.factor, 5):
                y = self.py(value * y_scale.factor)
                self.parts.append(f'<path class="grid" d="M{self.left} {y:.1f}H{self.right}"/>')
                self.text(self.left - 8, y + 4, plain(value), "end")
        if x_ticks:
            for value in ticks(self._x[0] / x_scale.factor, self._x[1] / x_scale.factor, 6):
                x = self.px(value * x_scale.factor)
                self.parts.append(f'<path class="grid" d="M{x:.1f} {self.bottom}v4"/>')
                self.text(x, self.bottom + 17, plain(value), "middle")
        if title:
            unit = f" ({x_scale.unit})" if x_scale.unit else ""
            self.text((self.left + self.right) / 2, self.bottom + 35, title + unit, "middle")
        self.parts.append(f'<path class="axis" d="M{self.left} {self.bottom}H{self.right}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", css: str = "") -> None:
        """Words at a place given in pixels."""
        mark = f' class="{css}"' if css else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(words)}</text>'
        )

    def line(self, points: Sequence[Point], stroke: str, width: float = 2.0, dash: str = "") -> None:
        if len(points) == 1:
            self.dot(points[0], stroke, "")
        path = "L".join(f"{self.px(x):.1f} {self.py(y):.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        if path:
            self.parts.append(
                f'<path d="M{path}" fill="none" stroke="{stroke}" stroke-width="{width}"'
                f' stroke-linejoin="round"{dashed}/>'
            )

    def band(self, lower: Sequence[Point], upper: Sequence[Point], fill: str) -> None:
        """The area between two lines."""
        around = [*lower, *reversed(upper)]
        path = "L".join(f"{self.px(x):.1f} {self.py(y):.1f}" for x, y in around)
        if path:
            self.parts.append(f'<path d="M{path}Z" fill="{fill}" opacity=".18"/>')

    def dot(self, point: Point, fill: str, tip: str, radius: float = 3.0) -> None:
        """A mark with a tooltip."""
        x, y = self.px(point[0]), self.py(point[1])
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}">{title}</circle>')

    def hover(self, points: Sequence[Point], tips: Sequence[str], stroke: str) -> None:
        """Marks that show on pointing, at most sixty of them."""
        step = max(1, math.ceil(len(points) / 60))
        for (x, y), tip in list(zip(points, tips, strict=True))[::-1][::step]:
            self.parts.append(
                f'<circle class="h" cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="6" fill="{stroke}">'
                f"<title>{escape(tip)}</title></circle>"
            )

    def level(self, y: float, words: str, *, below: bool = False, left: bool = False) -> None:
        """A dashed line across, with its words above or below it, at the right or the left."""
        at = self.py(y)
        self.parts.append(f'<path class="level" d="M{self.left} {at:.1f}H{self.right}"/>')
        x, anchor = (self.left + 4, "start") if left else (self.right, "end")
        self.text(x, at + (14 if below else -5), words, anchor, "word")

    def upright(self, x: float) -> None:
        """A dashed line from top to bottom."""
        self.parts.append(f'<path class="level" d="M{self.px(x):.1f} {self.top}V{self.bottom}"/>')

    def box(self, x: Point, y: Point, fill: str, tip: str = "") -> None:
        """A filled rectangle between two x and two y, with a tooltip."""
        left, right = self.px(x[0]), self.px(x[1])
        upper, lower = self.py(y[1]), self.py(y[0])
        wide, high = max(right - left, 0.4), lower - upper
        shape = f'x="{left:.1f}" y="{upper:.1f}" width="{wide:.1f}" height="{high:.1f}"'
        title = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.parts.append(f'<rect {shape} fill="{fill}"{title}')

    def svg(self) -> Markup:
        width, height = self._size
        return Markup(
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self._label)}"'
            f' style="min-width:{width * 3 // 4}px">{"".join(self.parts)}</svg>'
        )


def row_chart(label: str, names: Sequence[str], x: Point, *, row: int = 18, **options: object) -> Chart:
    """A chart of one row per name, the first at the top; row i reaches from y = -i - 1 to -i."""
    titled = 40 if options.get("x_title") else 22
    chart = Chart(
        label,
        x,
        (-float(len(names) or 1), 0.0),
        width=1120,
        height=12 + titled + row * max(1, len(names)),
        left=210,
        y_ticks=False,
        **options,  # type: ignore[arg-type]
    )
    for i, name in enumerate(names):
        chart.text(chart.left - 8, chart.py(-i - 0.5) + 4, name, "end")
    return chart
