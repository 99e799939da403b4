"""The report of some simulated runs: a table in a Markdown file, between two marks, and a plot next to it."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ipc.errors import ConfigError
from tools.lab.traces.summary import Seconds

BEGIN, END = "<!-- traces: begin -->", "<!-- traces: end -->"
_HEADINGS = (
    "trace",
    "policy",
    "finished",
    "TTFT p50 / p90 / p99",
    "urgent p90",
    "other clients p90",
    "queueing p50 / p90",
    "TPOT p50, ms",
    "preempted",
    "thrash",
    "prefix hits",
    "makespan",
)


def read_report(path: Path) -> tuple[str, str]:
    """Return the text before the marks and the text after them. A file that is not there yet holds only the marks.

    Errors: ConfigError if the file lacks the marks or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the report {path} cannot be read: {error}") from error
    parts = re.split(re.escape(BEGIN) + ".*?" + re.escape(END), text, flags=re.DOTALL)
    if len(parts) != 2:
        raise ConfigError(
            f"{path} must hold the line {BEGIN!r} and after it {END!r} once; it does {len(parts) - 1} times"
        )
    return parts[0], parts[1]


def write_report(
    path: Path, command: str, records: Sequence[Mapping[str, Any]], ttfts: Mapping[str, Mapping[str, Seconds]]
) -> None:
    """Replace the text between the marks, or create the file. ttfts: trace -> policy -> seconds.

    Errors: ConfigError if the file lacks the marks or cannot be written.
    """
    picture = path.with_suffix(".svg")
    body = "\n".join(
        [
            BEGIN,
            f"`{command}`",
            "",
            *_table(records),
            "",
            f"![Time to first token, by policy]({picture.name})",
            END,
        ]
    )
    before, after = read_report(path)
    try:
        _write(picture, distribution_plot(ttfts, "time to first token, s"))
        _write(path, f"{before}{body}{after}")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {path}: {error}") from error


def _table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [_cells(record) for record in records]
    return [_row(_HEADINGS), _row(["---"] * len(_HEADINGS)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(record: Mapping[str, Any]) -> list[str]:
    groups = record["ttft_s_of"]
    return [
        record["trace"],
        record["policy"],
        f"{record['finished']:,} of {record['requests']:,}",
        _seconds(record["ttft_s"], "p50", "p90", "p99"),
        _seconds(groups["urgent"], "p90"),
        _seconds(groups["other_clients"], "p90"),
        _seconds(record["queueing_s"], "p50", "p90"),
        "" if record["tpot_ms"] is None else f"{record['tpot_ms']['p50']:.1f}",
        f"{record['preemptions']:,}",
        f"{record['thrash']:.1%}",
        f"{record['prefix_hit_rate']:.0%}",
        f"{record['makespan_s']:,.0f}",
    ]


def _seconds(quantiles: Mapping[str, float] | None, *names: str) -> str:
    return "" if quantiles is None else " / ".join(f"{quantiles[name]:.2f}" for name in names)


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


# Cumulative distributions as an SVG file: one panel for each trace, one line for each policy, time on a log scale.


_WIDTH, _HEIGHT = 420, 260  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 34, 40  # around its axes
_NUM_POINTS = 160  # of a line
_COLORS = {"fcfs": "#4269d0", "priority": "#e0641a", "fair": "#2f9e62"}
_STYLE = "font-family:sans-serif;font-size:11px;fill:#333"


def distribution_plot(panels: Mapping[str, Mapping[str, Seconds]], label: str) -> str:
    """Return the SVG file's text. panels: title -> policy -> values > 0.

    label: name of the axis, with the values' unit.
    """
    width = _WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}">',
        f'<rect width="{width}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for index, (title, lines) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({index * _WIDTH} 0)">')
        parts += _panel(title, lines, label)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, lines: Mapping[str, Seconds], label: str) -> list[str]:
    everything = np.concatenate(list(lines.values()))
    low = math.floor(math.log10(max(1e-6, float(everything.min()))))
    high = max(low + 1, math.ceil(math.log10(max(1e-6, float(everything.max())))))
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + inner_width * (math.log10(max(10.0**low, value)) - low) / (high - low)

    def y(share: float) -> float:
        return _TOP + inner_height * (1 - share)

    parts = [_text(_LEFT, 14, title, "start")]
    for exponent in range(low, high + 1):
        at = x(10.0**exponent)
        parts.append(_line(at, _TOP, at, y(0)))
        parts.append(_text(at, y(0) + 14, f"{10.0**exponent:g}", "middle"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(_LEFT, y(share), _WIDTH - _RIGHT, y(share)))
        parts.append(_text(_LEFT - 5, y(share) + 4, f"{share:.0%}", "end"))
    parts.append(_text(_LEFT + inner_width / 2, _HEIGHT - 8, label, "middle"))
    for index, (policy, values) in enumerate(lines.items()):
        color = _COLORS.get(policy, "#666")
        shares = np.linspace(0, 1, min(_NUM_POINTS, len(values) + 1))
        points = " ".join(
            f"{x(value):.1f},{y(share):.1f}"
            for value, share in zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        left = _LEFT + 70 * index
        parts.append(f'<rect x="{left}" y="20" width="12" height="4" fill="{color}"/>')
        parts.append(_text(left + 16, 26, policy, "start"))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{_STYLE}">{escape(text)}</text>'
