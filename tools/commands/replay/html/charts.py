"""Charts as inline SVG: lines over time, and cumulative distributions."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from ipc.tables.arrays import Doubles, Ints

_WIDTH, _HEIGHT = 900, 150  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 20, 22
_NUM_BUCKETS = 450  # of a line
_NUM_QUANTILES = 100
_COLORS = ("#4269d0", "#e0641a", "#2f9e62", "#9c6ade", "#c02c4e")


def timeline(title: str, times: Doubles, values: Mapping[str, Ints | Doubles], seconds: float) -> str:
    """Return a chart of step functions: at times [n] in seconds, up to `seconds`, each line's values [n].

    If one bucket of time has several values, the largest is drawn.
    """
    most = max((float(line.max()) for line in values.values() if len(line)), default=0.0) or 1.0
    seconds = max(seconds, 1e-9)
    parts = _frame(title, [f"{share * seconds:,.3g} s" for share in (0, 0.25, 0.5, 0.75, 1)], most)
    for number, (name, line) in enumerate(values.items()):
        color = _COLORS[number % len(_COLORS)]
        parts.append(_path(_largest(times, line, seconds), most, color))
        parts.append(_legend(number, name, color))
    return _svg(parts)


def bands(
    title: str, times: Doubles, lines: Mapping[str, Doubles], seconds: float, *, low: Doubles, high: Doubles
) -> str:
    """Return a chart of lines [n] at times [n] in seconds, on the band from low [n] to high [n]; NaN leaves a gap."""
    values = [one[np.isfinite(one)] for one in (*lines.values(), high)]
    most = max((float(one.max()) for one in values if len(one)), default=0.0) or 1.0
    seconds = max(seconds, 1e-9)
    parts = _frame(title, [f"{share * seconds:,.3g} s" for share in (0, 0.25, 0.5, 0.75, 1)], most)
    places = times / seconds
    area = _points(places, high) + _points(places, low)[::-1]
    text = "L".join(f"{_x(place):.1f} {_y(min(value, most) / most):.1f}" for place, value in area)
    parts.append(f'<path d="M{text}Z" fill="{_COLORS[0]}" fill-opacity="0.2" stroke="none"/>' if area else "")
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        parts.append(_path(_points(places, line), most, color))
        parts.append(_legend(number, name, color))
    return _svg(parts)


def _points(places: Doubles, values: Doubles) -> list[tuple[float, float]]:
    known = np.isfinite(values)
    return list(zip(places[known].tolist(), values[known].tolist(), strict=True))


def distribution(title: str, values: Mapping[str, Sequence[float]]) -> str:
    """Return cumulative distributions of values > 0 in seconds, on a logarithmic axis; empty ones are left out."""
    lines = {name: np.maximum(np.array(line), 1e-6) for name, line in values.items() if len(line)}
    if not lines:
        return ""
    low = math.floor(math.log10(min(float(line.min()) for line in lines.values())))
    high = max(low + 1, math.ceil(math.log10(max(float(line.max()) for line in lines.values()))))
    labels = [f"{10.0**exponent:g} s" for exponent in range(low, high + 1)]
    parts = _frame(title, labels, 100.0, "%")
    shares = np.linspace(0, 1, _NUM_QUANTILES + 1)
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        places = (np.log10(np.quantile(line, shares)) - low) / (high - low)
        parts.append(_path(list(zip(places.tolist(), (100 * shares).tolist(), strict=True)), 100.0, color))
        parts.append(_legend(number, name, color))
    return _svg(parts)


def bar(parts: Sequence[tuple[str, float, str]], total: float, width: int) -> str:
    """Return a bar of coloured parts: (title, length, colour); total: the length of the whole width, in pixels."""
    at, drawn = 0.0, []
    for title, length, color in parts:
        size = width * length / max(total, 1e-12)
        shape = f'x="{at:.2f}" y="0" width="{size:.2f}" height="12" fill="{color}"'
        drawn.append(f"<rect {shape}><title>{escape(title)}</title></rect>")
        at += size
    return f'<svg width="{width}" height="12">{"".join(drawn)}</svg>'


def _largest(times: Doubles, line: Ints | Doubles, seconds: float) -> list[tuple[float, float]]:
    """Return points (share of the time, value) of a step function: the largest value of each bucket."""
    if not len(times):
        return []
    buckets = np.minimum((times / seconds * _NUM_BUCKETS).astype(np.int64), _NUM_BUCKETS - 1)
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    tops = np.maximum.reduceat(line, starts).tolist()
    points: list[tuple[float, float]] = []
    for place, value in zip((buckets[starts] / _NUM_BUCKETS).tolist(), tops, strict=True):
        if points:
            points.append((place, points[-1][1]))
        points.append((place, value))
    return [*points, (1.0, points[-1][1])]


def _frame(title: str, labels: Sequence[str], most: float, unit: str = "") -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="12" class="t">{escape(title)}</text>']
    for index, label in enumerate(labels):
        x = _x(index / max(1, len(labels) - 1))
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" class="g"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>')
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" class="g"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{share * most:,.4g}{unit}</text>')
    return parts


def _path(points: Sequence[tuple[float, float]], most: float, color: str) -> str:
    text = "L".join(f"{_x(place):.1f} {_y(value / most):.1f}" for place, value in points)
    return f'<path d="M{text}" fill="none" stroke="{color}" stroke-width="1.4"/>' if points else ""


def _legend(number: int, name: str, color: str) -> str:
    x = _WIDTH - _RIGHT - 130 * (number + 1)
    return f'<rect x="{x}" y="5" width="12" height="6" fill="{color}"/><text x="{x + 16}" y="12">{escape(name)}</text>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">{"".join(parts)}</svg>'


def _x(place: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * place


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)
