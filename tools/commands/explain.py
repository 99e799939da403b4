"""`engine-core explain`: why a request of a running or captured engine does not run, or the state of all requests."""

import re
import sys
from collections.abc import Sequence

import msgspec

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import ConfigError
from ipc.log_lines import counted
from ipc.wire.scheduling_messages import (
    EVERY_REQUEST,
    OWN_SESSION,
    Explanation,
    Reason,
    RequestExplanation,
    SchedulingState,
)
from tools.flags.address import address_to_connect
from tools.flags.options import ArgumentParser

_PAUSES = ("", "paused: no request begins; running ones continue", "paused: no request runs")


def main(arguments: Sequence[str]) -> int:
    """Print the explanation of one request or of the scheduler, and return the exit status. Errors: ConfigError."""
    parser = ArgumentParser(
        prog="engine-core explain",
        usage="engine-core explain [REQUEST] [--connect ADDR | --at STEP FILE] [--limit N] [--json]",
        description="Explain why a request of a running engine does not run, or did not run at a captured step. "
        "Without REQUEST: a summary of the scheduler.",
    )
    parser.add_argument("request", nargs="?", metavar="REQUEST", help="SESSION/NUMBER, as in the table")
    parser.add_argument("--connect", metavar="ADDR", help="the engine's address; default: that of `engine-core serve`")
    parser.add_argument(
        "--at", nargs=2, metavar=("STEP", "FILE"), help="explain the engine that wrote this capture, after this step"
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="most requests in the table; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    parsed = parser.parse_args(arguments)
    session, number = read_request(parsed.request)
    if parsed.at is not None:
        if parsed.connect is not None:
            parser.error("--at reads a file: leave out --connect")
        step, path = parsed.at
        explanation = _at(step, path, session, number, parsed.limit)
    else:
        explanation = _now(parsed.connect, session, number, parsed.limit)
    if parsed.json:
        sys.stdout.write(to_json(explanation) + "\n")
    elif parsed.request is not None:
        print("\n".join(line for one in explanation.requests for line in describe_request(one, explanation)))
    else:
        if parsed.at is not None:
            print(f"step {parsed.at[0]} of the file, which counts steps with nothing to run, too")
        print("\n".join(describe_all(explanation)))
    return 0


def _now(address: str | None, session: int, number: int, limit: int) -> Explanation:
    client = EngineClient(ZmqTransport(address_to_connect(address)), name="explain")
    try:
        return client.explain(number, session=session, limit=limit)
    finally:
        client.close()


def _at(step: str, path: str, session: int, number: int, limit: int) -> Explanation:
    # Imported late: asking a running engine needs no scheduler here.
    from tools.commands.replay.explain_at import explain_at

    if not re.fullmatch(r"[0-9]{1,18}", step):
        raise ConfigError(f"a step is a number from 0, as `engine-core replay` counts them; got --at {step!r:.40}")
    return explain_at(path, int(step), session, number, limit)


def read_request(text: str | None) -> tuple[int, int]:
    """Parse "3/17" into (session, number); None means every request of the own session. Errors: ConfigError."""
    if text is None:
        return OWN_SESSION, EVERY_REQUEST
    if not re.fullmatch(r"[0-9]{1,18}/[0-9]{1,10}", text):
        raise ConfigError(f"a request is named SESSION/NUMBER, as 3/17; got {text!r:.80}")
    session, number = text.split("/")
    return int(session), int(number)


def to_json(explanation: Explanation) -> str:
    """Return the explanation as one JSON object: fields by name, codes as text."""
    values = msgspec.structs.asdict(explanation)
    values["requests"] = [
        msgspec.structs.asdict(one) | {"state": one.state.name.lower(), "reason": one.reason.name.lower()}
        for one in explanation.requests
    ]
    return msgspec.json.encode(values).decode()


def describe_all(explanation: Explanation) -> list[str]:
    """Return lines that summarize the scheduler, then one line for each request."""
    e = explanation
    step = f"step {e.step}" if e.step >= 0 else "no step yet"
    lines = [
        f"{step}, policy {e.policy}: {e.num_running} of {counted(e.max_num_seqs, 'row')} run, "
        f"{counted(e.num_waiting, 'request waits', 'requests wait')} "
        f"({e.num_swapped} swapped out, {e.num_on_hold} whose clients do not read, {e.num_unbegun} because of a pause)",
        _blocks(e),
        f"last step: {e.max_num_batched_tokens - e.budget} of {counted(e.max_num_batched_tokens, 'token')} used, "
        f"{counted(e.num_skipped, 'row')} skipped",
    ]
    if e.encoder_cache_size:
        lines.append(
            f"images: a step encodes {counted(e.max_num_encoder_input_tokens, 'token')} at most; the embeddings of "
            f"{e.num_encoder_cache_tokens} of {counted(e.encoder_cache_size, 'token')} are kept"
        )
    if e.pause:
        lines.append(_PAUSES[e.pause])
    if e.requests:
        lines.append(f"{'request':>12}  {'state':8}  {'queue':>6}  {'tokens':>14}  {'waited':>9}  why")
    for one in e.requests:
        name = f"{one.session}/{one.number}" + (f".{one.choice}" if one.choice else "")
        place = str(one.position) if one.position >= 0 else "-"
        tokens = f"{one.num_computed_tokens}/{one.num_tokens}/{one.max_total_tokens}"
        waited = f"{one.waited_ns / 1e9:.3f}s"
        lines.append(f"{name:>12}  {_state(one):8}  {place:>6}  {tokens:>14}  {waited:>9}  {describe_reason(one)}")
    if e.num_left_out:
        lines.append(f"... and {e.num_left_out} more (--limit)")
    return lines


def describe_request(one: RequestExplanation, explanation: Explanation) -> list[str]:
    """Return lines with everything that the explanation says about one request."""
    name = f"request {one.session}/{one.number}" + (f", choice {one.choice}" if one.choice else "")
    lines = [
        f"{name}: {_state(one)} - {describe_reason(one)}",
        f"  arrived {one.waited_ns / 1e9:.3f} s ago with priority {one.priority}; "
        f"{counted(one.num_prompt_tokens, 'prompt token')}, {counted(one.num_tokens, 'token')} so far, at most "
        f"{one.max_total_tokens}; {one.num_computed_tokens} computed or found in the cache",
    ]
    if one.state is SchedulingState.RUNNING:
        lines.append(
            f"  number {one.position} in the order of service; holds {counted(one.num_blocks, 'block')}, lacks "
            f"{one.num_missing_blocks} for the tokens that it has"
        )
    else:
        place = (
            f"number {one.position} in the queue"
            if one.position >= 0
            else "not in the queue of requests that may start"
        )
        lines.append(
            f"  {place}; to start it needs {counted(one.num_missing_blocks, 'block')} in addition to {one.num_blocks} "
            f"found in the prefix cache, and {one.num_reserve_blocks} must stay free (watermark and hysteresis)"
        )
        lines.append("  " + _blocks(explanation))
    lines.append(
        f"  preempted {one.num_preemptions} times to make room for running requests; overtaken {one.num_overtaken} "
        "times while it was first"
    )
    if explanation.pause:
        lines.append("  " + _PAUSES[explanation.pause])
    return lines


def describe_reason(one: RequestExplanation) -> str:
    """Return the reason for a request's state as text, with its numbers."""
    holder = f"{one.holder_session}/{one.holder_number}"
    match one.reason:
        case Reason.NONE:
            return f"got {counted(one.last_tokens, 'token')} in the last step"
        case Reason.NO_ROW:
            return "every row is taken (max_num_seqs)"
        case Reason.NO_BUDGET:
            return f"needs {counted(one.needed, 'token')} of a step's budget, {one.available} were left"
        case Reason.PREEMPTED:
            return "was preempted in the last step"
        case Reason.FENCED:
            return "its room is being freed; the steps in flight must end first"
        case Reason.BEHIND:
            return f"behind {holder}, which lacks something and must start first"
        case Reason.NOT_YET:
            return "no step has considered it yet"
        case Reason.PAUSED:
            return "the engine's owner has paused it"
        case Reason.ON_HOLD:
            return "its client does not read its outputs"
        case Reason.FIRST_CHOICE:
            return "waits for its prompt, which another choice of its request computes"
        case Reason.FETCHING:
            return "KV blocks of its prompt are being read from files"
        case Reason.NO_REPLICA:
            return "no replica of the fleet takes it"
        case Reason.NO_BLOCKS:
            return f"needs {counted(one.needed, 'KV block')}, {one.available} are available"
        case Reason.PARTIAL_PREFILLS:
            return "the limit of prompts computed in chunks is reached (max_num_partial_prefills)"
        case Reason.NO_ADAPTER:
            return "the limit of adapters in use is reached (max_loras)"
        case Reason.NO_ENCODER_BUDGET | Reason.SKIPPED_ENCODER_BUDGET:
            return (
                f"its next image has {counted(one.needed, 'token')}, and the step could encode {one.available} more "
                "(max_num_encoder_input_tokens, encoder_cache_size)"
            )
        case Reason.IN_FLIGHT:
            return "its last token is being computed"
        case Reason.SKIPPED_BUDGET:
            return (
                f"skipped: needs {counted(one.needed, 'token')}, {one.available} were left after the requests before it"
            )
        case Reason.PROMPTS_FIRST:
            return "the last step had only prompts, which come first without chunked prefill"
        case Reason.NEXT_TURN:
            return "its turn comes in a later step: the pipeline's stages have other rows"
        case Reason.SKIPPED_BLOCKS:
            return f"skipped: needs {counted(one.needed, 'KV block')}, {one.available} were free"


def _state(one: RequestExplanation) -> str:
    return one.state.name.lower().replace("_", " ")


def _blocks(e: Explanation) -> str:
    common = f"; all running requests begin with the same {e.num_common_prefix_blocks}"
    return (
        f"KV blocks: {e.num_free_blocks} of {e.num_usable_blocks} free; of these {e.num_promised_blocks} promised to "
        f"running requests and {e.num_watermark_blocks} kept by the watermark; {e.num_fenced_blocks} more in flight"
        + (common if e.num_common_prefix_blocks else "")
        + (f"; pins hold {e.num_pinned_blocks} of at most {e.max_pinned_blocks}" if e.num_pinned_blocks else "")
    )
