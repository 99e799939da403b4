"""ServeGen's windows (Xiang et al., arXiv:2505.09999): requests generated, with a seed, from a client's parameters.

A file NAME-trace.csv has a line for each window: its start in seconds, requests a second, their coefficient of
variation, the distribution of their gaps (Gamma or Weibull) and its shape and scale. NAME-dataset.json next to it has
the lengths of longer windows: Python dicts as text, length: probability, which are read as literals.
"""

import ast
import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ipc.errors import ConfigError
from ipc.tables.arrays import Doubles, Ints
from tools.lab.traces.row import Making, Row

_SUFFIX = "-trace.csv"
_KINDS = ("Gamma", "Weibull")
_COLUMNS = 6


class _Lengths(NamedTuple):
    """Lengths and their probabilities."""

    values: Ints
    shares: Doubles


def is_windows(beginning: bytes) -> bool:
    """Return whether a file's first line is one of ServeGen's windows."""
    columns = beginning.partition(b"\n")[0].split(b",")
    return len(columns) == _COLUMNS and columns[3].strip().decode(errors="replace") in _KINDS


def generate(path: Path, num_rows: int | None, making: Making) -> list[Row]:
    """Return the requests that the windows describe; making.seed decides which. Errors: ConfigError."""
    if not path.name.endswith(_SUFFIX):
        raise ConfigError(
            f"{path} has ServeGen's windows; their lengths are found by the file's name, which must end in {_SUFFIX}"
        )
    windows = _windows(path)
    lengths = _read_lengths(path.with_name(path.name.removesuffix(_SUFFIX) + "-dataset.json"))
    draw = np.random.default_rng(making.seed)
    rows: list[Row] = []
    for begin, end, kind, shape, scale in windows:
        at = max(key for key in lengths if key <= max(begin, min(lengths)))
        inputs, outputs = lengths[at]
        now = begin
        while True:
            gap = draw.gamma(shape, scale) if kind == "Gamma" else scale * draw.weibull(shape)
            now += max(gap, 1e-9)
            if now >= end:
                break
            sizes = [int(draw.choice(one.values, p=one.shares)) for one in (inputs, outputs)]
            rows.append(Row(now, max(1, sizes[0]), max(1, sizes[1])))
            if len(rows) == num_rows:
                return rows
    return rows


def _windows(path: Path) -> list[tuple[float, float, str, float, float]]:
    """Return (begin, end, distribution, shape, scale) of each window with requests."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    found = []
    for number, line in enumerate(lines, 1):
        try:
            begin, rate, _, kind, shape, scale = line
            numbers = float(begin), float(rate), float(shape or 0), float(scale or 0)
        except ValueError as error:
            raise ConfigError(f"{path}, row {number}: {error}: {','.join(line):.80}") from None
        if numbers[1] > 0 and (kind not in _KINDS or min(numbers[2:]) <= 0):
            raise ConfigError(f"{path}, row {number}: expected Gamma or Weibull with a shape and a scale above 0")
        found.append((*numbers, kind))
    steps = np.diff([one[0] for one in found])
    width = float(steps[0]) if len(steps) else 600.0
    return [(begin, begin + width, kind, shape, scale) for begin, rate, shape, scale, kind in found if rate > 0]


def _read_lengths(path: Path) -> dict[float, tuple[_Lengths, _Lengths]]:
    """Return (input, output) lengths by the second from which they apply. Errors: ConfigError."""
    try:
        windows: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        found = {
            float(begin): (_lengths(one["input_tokens"]), _lengths(one["output_tokens"]))
            for begin, one in windows.items()
            if one.get("input_tokens") and one.get("output_tokens")
        }
    except (OSError, ValueError, KeyError, SyntaxError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no readable lengths ({error}); it belongs to the windows next to it") from None
    if not found:
        raise ConfigError(f"{path} has no lengths")
    return found


def _lengths(text: str) -> _Lengths:
    shares = ast.literal_eval(text)
    values = np.array(list(shares), np.int64)
    weights = np.array(list(shares.values()), np.float64)
    if not len(values) or not weights.sum() > 0 or weights.min() < 0:
        raise ValueError("expected lengths with probabilities")
    return _Lengths(values, weights / weights.sum())
