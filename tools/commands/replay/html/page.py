"""`engine-core replay FILE --html OUT`: a capture as one HTML page without network access and scripts."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from core.capture.file import CaptureFile
from core.capture.records import Header, decode_config
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from tools.commands.replay.html.charts import bar, distribution, timeline
from tools.commands.replay.html.lives import ARRIVING, DECODE, OTHER_CHOICE, PROMPT, Life, read_lives
from tools.commands.replay.html.series import RequestTimes, Series, read_series
from tools.commands.replay.latency import Summary, Times, latencies

NUM_SLOWEST = 20
_BAR_WIDTH = 420
_NS = 1e-9
_COLORS = {PROMPT: "#2f9e62", DECODE: "#4269d0", ARRIVING: "#bbb", OTHER_CHOICE: "#9ab"}
_WAIT_COLORS = ("#e0641a", "#c02c4e", "#9c6ade", "#b8860b", "#7a4a2a", "#555")
#: The beginning of a page. {title}: escaped text.
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
body{{font:14px/1.4 sans-serif;color:#222;max-width:960px;margin:24px auto;padding:0 12px}}
table{{border-collapse:collapse;margin:8px 0}}td,th{{padding:2px 10px 2px 0;text-align:right;vertical-align:top}}
td:first-child,th:first-child,td.l{{text-align:left}}svg{{display:block;margin:10px 0}}
svg text{{font:11px sans-serif;fill:#333}}svg .t{{font-weight:bold}}svg .g{{stroke:#ddd;fill:none}}
h1{{font-size:20px}}h2{{font-size:16px;margin-top:28px}}small{{color:#666}}td svg{{margin:3px 0}}
</style></head><body>
"""


def write_html(file: CaptureFile, path: str) -> int:
    """Write the page to a new file; return its bytes. No token of a conversation is in it.

    Errors: CaptureFileError if this version decides differently from the captured engine; ConfigError for the path.
    """
    series = read_series(file)
    slowest = sorted(series.requests, key=_seconds, reverse=True)[:NUM_SLOWEST]
    lives = {life.key: life for life in read_lives(file, [(one.client, one.number) for one in slowest])}
    data = page(file.header, str(file.path.name), series, slowest, lives).encode()
    try:
        with Path(path).open("xb") as out:
            out.write(data)
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}") from None
    return len(data)


def page(
    header: Header,
    name: str,
    series: Series,
    slowest: Sequence[RequestTimes],
    lives: dict[tuple[int, int], Life],
) -> str:
    """Return the page's text. slowest: the requests to describe one by one; lives: theirs."""
    seconds = float(series.begins[-1] + series.durations[-1]) if len(series.begins) else 0.0
    config = decode_config(header)
    num_blocks = config.num_blocks_override - 1
    used = 100 * (num_blocks - series.free_blocks) / max(1, num_blocks)
    parts = [HEAD.format(title=escape(f"{name}: an engine's run"))]
    parts.append(f"<h1>{escape(name)}</h1><p>{escape(_summary(header, series, seconds))}</p>")
    parts.append(_latency_table(series.requests))
    parts.append("<h2>Over time</h2>")
    parts.append(timeline("requests", series.begins, {"running": series.rows, "waiting": series.waiting}, seconds))
    parts.append(timeline("KV blocks held, %", series.begins, {"held": used}, seconds))
    parts.append(timeline("tokens computed in a step", series.begins, {"tokens": series.tokens}, seconds))
    parts.append(timeline("duration of a step, ms", series.begins, {"step": series.durations * 1e3}, seconds))
    parts.append("<h2>Latencies</h2>")
    parts.append(distribution("share of the requests", _latency_lines(series.requests)))
    parts.append(f"<h2>The {len(slowest)} slowest requests, and how their time was spent</h2>")
    parts.append(_slowest_table(slowest, lives))
    parts.append(_options(config))
    return "".join([*parts, "</body></html>\n"])


def _summary(header: Header, series: Series, seconds: float) -> str:
    requests = series.requests
    ends = {how: sum(one.how == how for one in requests) for how in sorted({one.how for one in requests})}
    told = ", ".join(f"{count:,} {how}" for how, count in ends.items())
    num_tokens = sum(one.num_tokens for one in requests)
    return (
        f"{header.model.name} ({header.model.numerics}), engine-core {header.engine_version}: "
        f"{len(requests):,} requests ({told}) in {seconds:,.1f} s and {len(series.begins):,} steps; "
        f"{num_tokens:,} output tokens ({num_tokens / max(seconds, _NS):,.1f} a second), "
        f"{series.num_cached_tokens:,} prompt tokens from the prefix cache, {series.num_preemptions:,} preemptions"
    )


def _latency_table(requests: Sequence[RequestTimes]) -> str:
    times = [
        Times(
            one.arrival,
            one.first_token,
            one.last_token,
            one.end if one.how not in ("open", "left", "failed", "abort") else None,
            one.num_tokens,
        )
        for one in requests
    ]
    found = latencies(times)
    rows = {"to the first token": found.ttft_ms, "between tokens": found.tpot_ms, "to the end": found.e2e_ms}
    cells = "".join(f"<tr><td>{name}</td>{_cells(summary)}</tr>" for name, summary in rows.items())
    names = ("requests", *Summary.__struct_fields__[1:])
    return f"<table><tr><th>ms</th>{''.join(f'<th>{name}</th>' for name in names)}</tr>{cells}</table>"


def _cells(summary: Summary | None) -> str:
    values = [0] if summary is None else list(msgspec.structs.astuple(summary))
    return "".join(f"<td>{value:,.4g}</td>" if index else f"<td>{value:,}</td>" for index, value in enumerate(values))


def _latency_lines(requests: Sequence[RequestTimes]) -> dict[str, list[float]]:
    return {
        "first token": [one.first_token - one.arrival for one in requests if one.first_token is not None],
        "end": [one.end - one.arrival for one in requests if one.end is not None],
    }


def _slowest_table(slowest: Sequence[RequestTimes], lives: dict[tuple[int, int], Life]) -> str:
    longest = max((_life_seconds(life) for life in lives.values()), default=0.0)
    rows = [_row(one, lives[one.client, one.number], longest) for one in slowest if (one.client, one.number) in lives]
    head = "<tr><th>request</th><th>prompt</th><th>output</th><th>s</th><th>how the time was spent</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _row(one: RequestTimes, life: Life, longest: float) -> str:
    colors = dict(_COLORS)
    for what in life.totals():
        if what not in colors:
            colors[what] = _WAIT_COLORS[(len(colors) - len(_COLORS)) % len(_WAIT_COLORS)]
    spans = [
        (_title(span.what, span.holder), (span.end_ns - span.begin_ns) * _NS, colors[span.what]) for span in life.spans
    ]
    told = "; ".join(f"{what} {ns * _NS:,.3g} s" for what, ns in life.totals().items())
    return (
        f"<tr><td>{one.client}/{one.number} <small>{escape(one.how)}</small></td><td>{one.num_prompt_tokens:,}</td>"
        f"<td>{one.num_tokens:,}</td><td>{_life_seconds(life):,.3g}</td>"
        f'<td class="l">{bar(spans, longest, _BAR_WIDTH)}<small>{escape(told)}</small></td></tr>'
    )


def _title(what: str, holder: tuple[int, int] | None) -> str:
    return what if holder is None else f"{what}: {holder[0]}/{holder[1]}"


def _options(config: msgspec.Struct) -> str:
    usual = EngineConfig()
    changed = {
        name: value
        for name, value in msgspec.structs.asdict(config).items()
        if value != getattr(usual, name) and value is not None
    }
    text = ", ".join(f"{name}={value}" for name, value in changed.items())
    return f"<h2>Options that differ from the defaults</h2><p><small>{escape(text)}</small></p>"


def _seconds(one: RequestTimes) -> float:
    """Return how long a request took; one without an end is the slowest."""
    return float("inf") if one.end is None else one.end - one.arrival


def _life_seconds(life: Life) -> float:
    return (life.spans[-1].end_ns - life.spans[0].begin_ns) * _NS
