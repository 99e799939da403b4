"""The lives of a capture's slowest requests: how the time from arrival to end was spent, without a gap."""

from collections.abc import Collection, Sequence

import msgspec

from core.capture.file import CaptureFile, Turn
from core.engine import EngineCore
from core.inputs import EngineReply
from core.scheduling.explain import explain
from ipc.wire.messages import Outputs, RequestFailed
from ipc.wire.scheduling_messages import Explain, Explanation, Reason, RequestExplanation
from tools.commands.replay.output_rows import output_rows
from tools.commands.replay.rerun import Replay, recorded_executor, replay_config

#: (client, request number)
RequestKey = tuple[int, int]

PROMPT, DECODE, ARRIVING, OTHER_CHOICE = (
    "computes its prompt",
    "decodes",
    "travels to the engine",
    "other choices continue",
)
_WAITS = {
    Reason.NO_ROW: "waits for a row (max_num_seqs)",
    Reason.NO_BUDGET: "waits for tokens of a step (max_num_batched_tokens)",
    Reason.PREEMPTED: "was preempted",
    Reason.FENCED: "waits for blocks that a step in flight still uses",
    Reason.BEHIND: "waits behind another request",
    Reason.NOT_YET: "waits to be considered",
    Reason.PAUSED: "waits for the end of a pause",
    Reason.ON_HOLD: "is on hold: its client does not read",
    Reason.FIRST_CHOICE: "waits for the prompt that another choice computes",
    Reason.FETCHING: "waits for KV blocks from files",
    Reason.NO_BLOCKS: "waits for KV blocks",
    Reason.PARTIAL_PREFILLS: "waits for other prompts (max_num_partial_prefills)",
    Reason.NO_ADAPTER: "waits for other requests' adapters (max_loras)",
    Reason.NO_ENCODER_BUDGET: "waits for its image (max_num_encoder_input_tokens, encoder_cache_size)",
    Reason.IN_FLIGHT: "runs, its last token in flight",
    Reason.SKIPPED_BUDGET: "runs without tokens: others took the step's",
    Reason.SKIPPED_BLOCKS: "runs without tokens: others took the blocks",
    Reason.PROMPTS_FIRST: "runs without tokens: the step has only prompts",
    Reason.NEXT_TURN: "runs, its turn comes in a later step (pipeline_parallel_size)",
    Reason.SKIPPED_ENCODER_BUDGET: "runs without tokens: others' images took the encoder's budget",
}


class Span(msgspec.Struct):
    """A part of a life. holder: the request that it waits behind; None: none."""

    what: str
    begin_ns: int
    end_ns: int
    holder: RequestKey | None = None


class Life(msgspec.Struct):
    """A request's consecutive spans, from its arrival to its end or to the capture's."""

    key: RequestKey
    spans: list[Span]
    has_token: bool = False

    def totals(self) -> dict[str, int]:
        """Return the ns of each kind of span, the longest first."""
        found: dict[str, int] = {}
        for span in self.spans:
            found[span.what] = found.get(span.what, 0) + span.end_ns - span.begin_ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def enter(self, what: str, now_ns: int, holder: RequestKey | None = None) -> None:
        """End the present span and begin another one if the state changes."""
        last = self.spans[-1]
        if (last.what, last.holder) == (what, holder):
            return
        last.end_ns = now_ns
        if last.begin_ns == now_ns:
            self.spans.pop()
        self.spans.append(Span(what, now_ns, now_ns, holder))


def read_lives(file: CaptureFile, wanted: Collection[RequestKey]) -> list[Life]:
    """Run the capture again and follow these requests; return their lives, in order of arrival.

    A request with several choices is described by its first choice, while that is live.
    """
    config, wanted = replay_config(file.header), set(wanted)
    replay = Replay(file, config, recorded_executor(file))
    lives: dict[RequestKey, Life] = {}
    live: set[RequestKey] = set()
    end_ns = 0
    for turn, _, replies in replay.steps():
        _receive(turn, wanted, lives, live)
        begin_ns, end_ns = turn.step.now_ns, turn.step.now_ns + turn.step.elapsed_ns
        ended = _ended(replies, live, lives)
        for key in live:
            if key not in ended:
                _follow(lives[key], replay.engine, config.scheduling_policy, begin_ns)
        for key in ended:
            life = lives[key]
            life.enter(DECODE if life.has_token else life.spans[-1].what, begin_ns)
            life.spans[-1].end_ns = end_ns
            live.discard(key)
    for key in live:
        lives[key].spans[-1].end_ns = end_ns
    return list(lives.values())


def _receive(turn: Turn, wanted: set[RequestKey], lives: dict[RequestKey, Life], live: set[RequestKey]) -> None:
    for (client, message), received_ns in zip(turn.inbox, turn.received_ns, strict=True):
        key = (client, getattr(message, "number", -1))
        if key in wanted and key not in lives and hasattr(message, "prompt_token_ids"):
            at_ns = received_ns or turn.step.now_ns
            lives[key] = Life(key, [Span(ARRIVING, at_ns, at_ns)])
            live.add(key)


def _ended(
    replies: Sequence[tuple[int, EngineReply]], live: set[RequestKey], lives: dict[RequestKey, Life]
) -> set[RequestKey]:
    """Return the requests that these replies end, and note which ones got a token."""
    ended: set[RequestKey] = set()
    for client, reply in replies:
        if isinstance(reply, RequestFailed):
            ended.add((client, reply.number))
        elif isinstance(reply, Outputs):
            for row in output_rows(reply):
                key = (client, row.number)
                if key in live and row.choice == 0:
                    lives[key].has_token = lives[key].has_token or bool(row.tokens)
                    if row.finish:
                        ended.add(key)
    return ended & live


def _follow(life: Life, engine: EngineCore, policy: str, now_ns: int) -> None:
    """Enter the request's state after a step that began at this time."""
    client, number = life.key
    answer = explain(engine.scheduler, policy, 0, Explain(0, number, client, 1), now_ns)
    if not isinstance(answer, Explanation) or not answer.requests:
        return
    one = answer.requests[0]
    holder = (one.holder_session, one.holder_number) if one.holder_session else None
    life.enter(_what(one, life), now_ns, holder if one.reason == Reason.BEHIND else None)


def _what(one: RequestExplanation, life: Life) -> str:
    if one.reason != Reason.NONE:
        return _WAITS.get(one.reason, one.reason.name.lower())
    if one.choice:
        return OTHER_CHOICE
    return DECODE if life.has_token else PROMPT
