"""Charts as inline SVG, made from numbers alone: no script, no request, readable in light and dark.

Colours and line widths are classes of `page.css`; a chart scales to the width of what holds it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 32

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    label: str
    points: tuple[Point, ...]
    colour: str = "a"
    """Class of `page.css`: a, b, c or d."""
    dots: bool = False
    """Points joined by a line; else a line alone."""
    errors: tuple[tuple[float, float], ...] = ()
    """Low and high of each point, where there is an interval."""
    smooth: bool = False
    """Draw it faintly, with its moving average on top."""


def ticks(low: float, high: float, num: int = 4) -> list[float]:
    """Round values that cover [low, high]: steps of 1, 2, 2.5 or 5 times a power of ten."""
    scale = max(abs(low), abs(high))
    if high - low <= max(1e-9 * scale, 1e-300):  # too narrow to tell values apart on an axis
        pad = scale * 0.5 if scale > 1e-300 else 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short text of a figure: three significant digits, thousands as k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def moving_average(points: Sequence[Point], span: int) -> list[Point]:
    """Centred mean over up to `span` points; fewer at the ends."""
    half = span // 2
    averaged = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - half) : index + half + 1]
        averaged.append((x, sum(y for _, y in near) / len(near)))
    return averaged


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_from_zero: bool = False,
    y_range: tuple[float, float] | None = None,
    percent: bool = False,
) -> str:
    """Lines over a common x. An empty chart says that there is nothing yet."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return '<p class="nothing">nothing yet</p>'
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + [y for one in drawn for pair in one.errors for y in pair]
    low, high = y_range or (min([0.0, *ys] if y_from_zero else ys), max(ys))
    y_ticks = ticks(low, high)
    place = _Scale(min(xs), max(xs), y_ticks[0], y_ticks[-1])
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        *_grid(place, y_ticks, x_label, percent),
    ]
    for one in drawn:
        parts += _line(one, place)
    return "".join([*parts, "</svg>", _legend(drawn)])


@dataclass(frozen=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low or 1.0
        return HEIGHT - BOTTOM - (value - self.y_low) / span * (HEIGHT - TOP - BOTTOM)


def _grid(place: _Scale, y_ticks: list[float], x_label: str, percent: bool) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = place.y(tick)
        text = f"{tick * 100:.3g} %" if percent else number(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
    whole = [tick for tick in ticks(place.x_low, place.x_high, 5) if place.x_low <= tick <= place.x_high]
    for tick in whole:
        if tick == int(tick):
            x = place.x(tick)
            parts.append(f'<text class="tick middle" x="{x:.1f}" y="{HEIGHT - 15}">{number(tick)}</text>')
    parts.append(f'<text class="tick end" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}">{escape(x_label)}</text>')
    return parts


def _line(one: Series, place: _Scale) -> list[str]:
    parts = []
    smooth = one.smooth and len(one.points) >= 12
    parts.append(_path(one.points, place, f"line {one.colour}" + (" faint" if smooth else "")))
    if smooth:
        span = max(5, len(one.points) // 8)
        parts.append(_path(moving_average(one.points, span), place, f"line {one.colour}"))
    for (x, _), (low, high) in zip(one.points, one.errors, strict=bool(one.errors)) if one.errors else ():
        at = place.x(x)
        parts.append(
            f'<line class="error {one.colour}" x1="{at:.1f}" x2="{at:.1f}" '
            f'y1="{place.y(low):.1f}" y2="{place.y(high):.1f}"/>'
        )
    if one.dots or len(one.points) == 1:
        for x, y in one.points:
            parts.append(
                f'<circle class="dot {one.colour}" cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="3.2">'
                f"<title>{escape(one.label)} {number(y)} at {number(x)}</title></circle>"
            )
    return parts


def _path(points: Sequence[Point], place: _Scale, css: str) -> str:
    steps = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in points)
    return f'<polyline class="{css}" points="{steps}"/>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = "".join(f'<span><i class="key {one.colour}"></i>{escape(one.label)}</span>' for one in series)
    return f'<p class="legend">{keys}</p>'


def bars(rows: Sequence[tuple[str, float, str]], *, colour: str = "a") -> str:
    """Horizontal bars with their figures: (label, value, text). HTML, so that labels wrap on a phone."""
    if not rows:
        return '<p class="nothing">nothing yet</p>'
    largest = max(value for _, value, _ in rows) or 1.0
    cells = "".join(
        f'<span class="bar-label">{escape(label)}</span>'
        f'<span class="bar"><i class="fill {colour}" style="width:{_share(value, largest):.1f}%"></i></span>'
        f'<span class="bar-value">{escape(text)}</span>'
        for label, value, text in rows
    )
    return f'<div class="bars">{cells}</div>'


def _share(value: float, largest: float) -> float:
    """In per cent; what is not nothing stays visible."""
    return max(value / largest * 100, 0.4) if value > 0 else 0.0


# --- timeline ------------------------------------------------------------------------------------------------

LANE_WIDTH, LANE_LEFT, LANE_RIGHT, LANE_HEIGHT, LANE_GAP = 1040, 106, 16, 34, 14


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One service: spans of what it did, and how busy it was."""

    label: str
    spans: tuple[tuple[float, float, str], ...]
    """From, to (seconds since the start), class of `page.css`."""
    level: tuple[Point, ...] = ()
    """Seconds → share of the lane's height, 0 to 1: CPU, or work under way."""


def timeline(lanes: Sequence[Lane], length_s: float, marks: Sequence[Point]) -> str:
    """Lanes over a common clock. `marks`: seconds and version of each publication, drawn through all lanes."""
    height = len(lanes) * (LANE_HEIGHT + LANE_GAP) + 34
    scale = (LANE_WIDTH - LANE_LEFT - LANE_RIGHT) / max(length_s, 1e-9)
    parts = [f'<svg class="timeline" viewBox="0 0 {LANE_WIDTH} {height}" role="img">']
    labelled = ticks(marks[0][1], marks[-1][1], 8) if marks else []
    for at_s, version in marks:
        x = LANE_LEFT + at_s * scale
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="12" y2="{height - 22}"/>')
        if version in labelled:
            parts.append(f'<text class="tick middle" x="{x:.1f}" y="9">v{version:g}</text>')
    for index, lane in enumerate(lanes):
        top = 14 + index * (LANE_HEIGHT + LANE_GAP)
        parts.append(f'<text class="lane-label" x="0" y="{top + 21}">{escape(lane.label)}</text>')
        parts.append(
            f'<rect class="lane" x="{LANE_LEFT}" y="{top}" width="{LANE_WIDTH - LANE_LEFT - LANE_RIGHT}" '
            f'height="{LANE_HEIGHT}" rx="3"/>'
        )
        parts += _level(lane, top, scale)
        parts += [
            f'<rect class="span {css}" x="{LANE_LEFT + start * scale:.1f}" y="{top + LANE_HEIGHT - 8}" '
            f'width="{max((end - start) * scale, 0.7):.1f}" height="8"/>'
            for start, end, css in _merged(lane.spans, 0.8 / scale)
        ]
    unit_s, unit = (60.0, "min") if length_s > 180 else (1.0, "s")
    for tick in ticks(0, length_s / unit_s, 8):
        if tick * unit_s <= length_s:
            x = LANE_LEFT + tick * unit_s * scale
            parts.append(f'<text class="tick middle" x="{x:.1f}" y="{height - 4}">{tick:g} {unit}</text>')
    return "".join([*parts, "</svg>"])


def _level(lane: Lane, top: float, scale: float) -> list[str]:
    if not lane.level:
        return []
    bottom, full = top + LANE_HEIGHT - 9, LANE_HEIGHT - 10
    steps = " ".join(f"{LANE_LEFT + x * scale:.1f},{bottom - min(y, 1.0) * full:.1f}" for x, y in lane.level)
    first, last = LANE_LEFT + lane.level[0][0] * scale, LANE_LEFT + lane.level[-1][0] * scale
    return [f'<polygon class="level" points="{first:.1f},{bottom} {steps} {last:.1f},{bottom}"/>']


def _merged(spans: Sequence[tuple[float, float, str]], gap_s: float) -> list[tuple[float, float, str]]:
    """Neighbours of one kind, closer than a pixel, as one: a long run stays a small page."""
    merged: list[tuple[float, float, str]] = []
    last: dict[str, int] = {}
    for start, end, css in sorted(spans):
        index = last.get(css)
        if index is not None and start <= merged[index][1] + gap_s:
            merged[index] = (merged[index][0], max(merged[index][1], end), css)
        else:
            last[css] = len(merged)
            merged.append((start, end, css))
    return merged
