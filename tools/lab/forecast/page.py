"""The report of a forecast: a table for the terminal, and one HTML page without network access and scripts."""

import math
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

import numpy as np

from core.model_files.inspection import Needs
from ipc.tables.arrays import Doubles
from tools.commands.list import bytes_in_words
from tools.commands.replay.html.charts import bands, distribution
from tools.commands.replay.html.page import HEAD
from tools.lab.forecast.forecast import COVERED, WINDOW, Forecast, Outcome, windows
from tools.lab.traces.row import Trace

_DISTURBED = 25.0  # percent by which the median step of a measured run may miss its fit
_MAX_WINDOWS = 400  # of a chart
_NAMES = {
    "ttft_mean": "time to the first token, mean, ms",
    "ttft_p50": "... median",
    "ttft_p90": "... 90 %",
    "ttft_p99": "... 99 %",
    "tpot_mean": "time between tokens, mean, ms",
    "tpot_p99": "... 99 %",
    "e2e_mean": "time to the last token, mean, ms",
    "e2e_p99": "... 99 %",
    "tokens_per_s": "output tokens a second",
}


class Report(NamedTuple):
    """What a report is about.

    found: replicas that hold the SLO; None = not asked, 0 = there is no number. needs: of the model's memory; None =
    it is not known.
    """

    trace: Trace
    seen: Outcome
    forecast: Forecast
    num_too_long: int
    slo: str | None
    found: int | None
    needs: Needs | None = None

    def lines(self) -> list[tuple[str, str, str, str]]:
        """Return (figure, observed there, forecast here, its bar) as text."""
        seen, found = self.seen.figures(), self.forecast.figures()
        return [
            (text, _text(seen[name]), _text(found[name][0]), f"{_text(found[name][1])} to {_text(found[name][2])}")
            for name, text in _NAMES.items()
        ]

    def facts(self) -> list[str]:
        """Return sentences about the forecast."""
        engine, runs, trace = self.forecast.engine, self.forecast.runs, self.trace
        config = engine.config
        num_blocks = config.num_blocks_override - 1
        used = max(run.max_used_blocks for run in runs)
        count, cached = len(trace.rows), round(np.mean([run.num_cached_tokens for run in runs]))
        facts = [
            f"{count:,} requests of {trace.name}, {trace.num_skipped:,} that failed there left out, "
            f"{self.num_too_long:,} too long for this engine (max_model_len {config.max_model_len:,}).",
            f"{engine.info.name} ({engine.info.numerics}), fingerprint {engine.info.fingerprint}.",
            f"Memory: at most {used:,} of {num_blocks:,} KV blocks of {config.block_size} tokens held, "
            f"{100 * used / max(1, num_blocks):.0f} %{self._bytes(used)}.",
            f"Preemptions: {min(run.num_preemptions for run in runs):,} to "
            f"{max(run.num_preemptions for run in runs):,}. Prompt tokens from the prefix cache: {cached:,} of "
            f"{sum(row.num_input for row in trace.rows):,}.",
            f"{len(runs)} simulations. The bars are made to hold {100 * COVERED:.0f} % of the windows of {WINDOW} "
            f"requests; {engine.num_windows} windows of the measured run set their width.",
        ]
        inside, of = self.forecast.bars("ttft").covers(windows(self.seen.ttft))
        if of:
            facts.append(
                f"Of {of:,} windows as observed there, {inside:,} are within the bars of the first token here."
            )
        error = 100 * engine.time.median_error
        disturbed = ": the machine was busy with other work, measure again" if error > _DISTURBED else ""
        facts.append(f"Steps of the measured run were fitted within {error:.0f} % (median){disturbed}.")
        if trace.num_estimated:
            facts.append(f"The lengths of {trace.num_estimated:,} requests are estimates: the server did not say them.")
        uncovered = 100 * float(np.mean([run.uncovered for run in runs]))
        if uncovered > 5:
            facts.append(f"{uncovered:.0f} % of the steps are larger than any measured one: extrapolated.")
        if self.slo is not None and self.found is not None:
            number = f"{self.found} replicas hold" if self.found else "No allowed number of replicas holds"
            facts.append(f"{number} {self.slo} (without the way between client and engine).")
        return facts

    def _bytes(self, num_blocks: int) -> str:
        """Return what these blocks take in memory, as the end of a sentence."""
        needs, config = self.needs, self.forecast.engine.config
        if needs is None or needs.weights_as_stored is None:
            return ""
        size = num_blocks * config.block_size * needs.kv_cache_per_token
        return f": {bytes_in_words(size)} in bfloat16, next to {bytes_in_words(needs.weights_as_stored)} of weights"


def _text(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:,.1f}"


def page(report: Report) -> str:
    """Return the page's text."""
    name = report.trace.name
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in report.lines())
    head = "<tr><th></th><th>observed there</th><th>forecast here</th><th>bar</th></tr>"
    facts = "".join(f"<p>{escape(fact)}</p>" for fact in report.facts())
    parts = [HEAD.format(title=escape(f"{name}: a forecast")), f"<h1>{escape(name)} on engine-core: a forecast</h1>"]
    parts += [f"<table>{head}{rows}</table>{facts}", "<h2>Over the day</h2>"]
    parts += [_chart(report, "ttft", "time to the first token, ms"), _chart(report, "tpot", "time between tokens, ms")]
    parts.append("<h2>Latencies</h2>")
    parts += [_distribution(report, "ttft", "first token"), _distribution(report, "e2e", "last token")]
    parts.append(f"<h2>What it assumes</h2><p><small>{escape(_ASSUMES)}</small></p>")
    return "".join([*parts, "</body></html>\n"])


_ASSUMES = (
    "Requests arrive when they did, however fast the answers are. Prompts share what their recorded hashes share. A "
    "cancelled request is aborted after as many tokens as its client had. Answers are as long as they were: another "
    "model may write more or less. Several choices of a request count as one answer of their total length. Bars "
    "describe a machine as busy with other work as it was in the measured run."
)


def _chart(report: Report, name: str, title: str) -> str:
    """Return a chart of the windows; several of a long day are one point, with the widest bar."""
    bars = report.forecast.bars(name)
    seen, times = windows(getattr(report.seen, name)), windows(report.seen.arrival)
    each = -(-len(times) // _MAX_WINDOWS)
    lines = {"forecast here": bars.middle, "observed there": seen}
    shown = {label: _grouped(1e3 * line, each, np.nanmean) for label, line in lines.items()}
    low, high = _grouped(1e3 * bars.low, each, np.nanmin), _grouped(1e3 * bars.high, each, np.nanmax)
    return bands(title, _grouped(times, each, np.nanmean), shown, float(times[-1]), low=low, high=high)


def _grouped(values: Doubles, each: int, how: Callable[[Doubles], Any]) -> Doubles:
    """Return one value for `each` consecutive ones; NaN: none of them is known."""
    parts = [values[at : at + each] for at in range(0, len(values), each)]
    return np.array([how(part) if np.isfinite(part).any() else np.nan for part in parts])


def _distribution(report: Report, name: str, title: str) -> str:
    """Return the distributions over the requests, there and here."""
    here = np.concatenate([getattr(run.outcome, name) for run in report.forecast.runs])
    lines = {"forecast here": here, "observed there": getattr(report.seen, name)}
    return distribution(f"to the {title}", {label: line[np.isfinite(line)].tolist() for label, line in lines.items()})
