"""The screen of `engine-core top`: the engine in some lines, its clients, and its requests as a table."""

from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from frontend.client.client import EngineClient
from ipc.wire.messages import ModelInformation
from ipc.wire.scheduling_messages import RequestExplanation, SchedulingState
from tools.commands.explain import describe_reason, describe_request
from tools.commands.top.watch import Look, Rates, Watch
from tools.terminal.streams import printable

HELP = "q quit  ↑↓ select  enter explain  a abort  p pause  r resume"
_BAR = 20  # characters
_CLIENTS_SHOWN = 8


class Client(NamedTuple):
    """The requests of one client that the engine has listed."""

    session: int
    num_running: int
    num_waiting: int
    longest_wait_s: float


def screen(watch: Watch, selected: int, note: str, height: int) -> RenderableType:
    """Return everything to show.

    selected: index of a request; -1 = a page without keys. note: answer to the last key. height: lines.
    """
    look, rates = watch.last, watch.rates()
    if look is None or watch.model is None:
        return Text(f"no engine yet: {watch.error}" if watch.error else "connecting")
    parts: list[RenderableType] = [*_head(watch, watch.model, look, rates)]
    clients = clients_of(look)
    parts.append(_clients_table(clients))
    left = height - len(parts) - min(len(clients), _CLIENTS_SHOWN) - note.count("\n") - 5
    parts.append(_requests_table(look.explanation.requests, selected, max(3, left)))
    if note:
        parts.append(Text(printable(note), style="yellow"))
    if selected >= 0:
        parts.append(Text(HELP, style="dim"))
    return Group(*parts)


def clients_of(look: Look) -> list[Client]:
    """Return the clients that have requests, those with the most waiting requests first."""
    found: dict[int, list[RequestExplanation]] = {}
    for one in look.explanation.requests:
        found.setdefault(one.session, []).append(one)
    clients = []
    for session, requests in found.items():
        waiting = [one for one in requests if one.state is not SchedulingState.RUNNING]
        longest = max((one.waited_ns for one in waiting), default=0) / 1e9
        clients.append(Client(session, len(requests) - len(waiting), len(waiting), longest))
    return sorted(clients, key=lambda one: (-one.num_waiting, -one.num_running, one.session))


def explained(request: RequestExplanation, client: EngineClient) -> str:
    """Ask the engine and return as text why this request runs or does not. Errors: CallFailedError if it has ended."""
    explanation = client.explain(request.number, session=request.session)
    return "\n".join(line for one in explanation.requests for line in describe_request(one, explanation))


def _head(watch: Watch, model: ModelInformation, look: Look, rates: Rates | None) -> list[Text]:
    statistics, e = look.statistics, look.explanation
    assert watch.client is not None or watch.error, "a sample without a session"
    epoch = "" if watch.client is None else f"  epoch {watch.client.welcome.epoch}"
    lost = f"  lost {watch.num_lost} times" if watch.num_lost else ""
    pause = ("", "  PAUSED: no request begins", "  PAUSED: no request runs")[e.pause]
    title = f"{model.model_name}  {model.executor} {model.dtype} {model.numerics}{epoch}{lost}{pause}"
    used = statistics.num_blocks - 1 - statistics.num_free_blocks
    share = used / max(1, statistics.num_blocks - 1)
    bar = "#" * round(share * _BAR) + "-" * (_BAR - round(share * _BAR))
    oldest = max((one.waited_ns for one in e.requests if one.state is not SchedulingState.RUNNING), default=0) / 1e9
    lines = [
        Text(title, style="bold"),
        Text(
            f"running {statistics.num_running}/{model.max_num_seqs}"
            f"  waiting {statistics.num_waiting} (oldest {oldest:.1f} s)"
            f"  swapped {statistics.num_swapped}  on hold {statistics.num_on_hold}  kv {bar} {share:.0%}"
            + (f", {statistics.num_pinned_blocks} pinned by {statistics.num_pins}" if statistics.num_pins else "")
        ),
    ]
    if rates is not None:
        lines.append(
            Text(
                f"tokens/s {rates.tokens_per_s:,.0f} out, {rates.prompt_tokens_per_s:,.0f} of prompts"
                f"  prefix hits {_percent(rates.prefix_hit_rate)}"
                f"  TTFT p50 {_ms(rates.ttft_p50_s)} p99 {_ms(rates.ttft_p99_s)}"
                f"  between tokens p50 {_ms(rates.itl_p50_s)} p99 {_ms(rates.itl_p99_s)}"
            )
        )
        lines.append(
            Text(
                f"step {e.step:,}  {rates.steps_per_s:,.1f} a second  {_number(rates.step_ms)} ms each, with "
                f"{_number(rates.rows_per_step)} requests and {_number(rates.tokens_per_step)} tokens"
            )
        )
    if watch.error:
        lines.append(Text(printable(watch.error), style="red"))
    return lines


def _clients_table(clients: list[Client]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="reverse")
    for name in ("CLIENT", "RUNNING", "WAITING", "LONGEST WAIT"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in clients[:_CLIENTS_SHOWN]:
        wait = f"{one.longest_wait_s:.1f} s" if one.num_waiting else ""
        table.add_row(str(one.session), str(one.num_running), str(one.num_waiting), wait)
    return table


def _requests_table(requests: list[RequestExplanation], selected: int, num_rows: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="reverse", expand=True)
    for name in ("REQUEST", "STATE", "TOKENS", "MOST", "AGE", "PREEMPTED"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("WHY", no_wrap=True, overflow="ellipsis", ratio=1)
    first = max(0, min(selected - num_rows + 1, len(requests) - num_rows))
    for index, one in enumerate(requests[first : first + num_rows], first):
        table.add_row(
            name_of(one),
            one.state.name.lower().replace("_", " "),
            str(one.num_tokens),
            str(one.max_total_tokens),
            f"{one.waited_ns / 1e9:.1f} s",
            str(one.num_preemptions),
            describe_reason(one),
            style="reverse" if index == selected else "",
        )
    return table


def name_of(request: RequestExplanation) -> str:
    """Return SESSION/NUMBER, with the choice if it is not the first."""
    return f"{request.session}/{request.number}" + (f".{request.choice}" if request.choice else "")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"≤{seconds * 1000:g} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
