"""The report of some simulated runs: a table in a Markdown file, between two marks, and a plot beside the file."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ipc.errors import ConfigError
from tools.lab.traces.plot import distribution_plot
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


def write_report(
    path: Path, command: str, records: Sequence[Mapping[str, Any]], ttfts: Mapping[str, Mapping[str, Seconds]]
) -> None:
    """Replace the text between the marks, or make the file. ttfts: trace -> policy -> seconds.

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
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
        changed, count = re.subn(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: body, text, flags=re.DOTALL)
        if count != 1:
            raise ConfigError(f"{path} must hold the line {BEGIN!r} and after it {END!r} once; it does {count} times")
        _write(picture, distribution_plot(ttfts, "time to first token, s"))
        _write(path, changed)
    except (OSError, UnicodeDecodeError) as error:
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
