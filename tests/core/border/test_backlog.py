"""The backlog of a slow client: merged outputs say what the single ones said, in fewer bytes."""

import random

import msgspec
import numpy as np
import pytest

from core.border import backlog
from core.border.backlog import Backlog, merge_outputs
from frontend.client.journal import Journal
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
    AddRequest,
    CallDone,
    ErrorCode,
    FinishReason,
    Outputs,
    RequestFailed,
    decode_server_message,
)


def step_outputs(step: int, rows: list[tuple[int, int, int]], finish: dict[int, int] | None = None) -> Outputs:
    """Rows of (number, position, token)."""
    numbers, positions, tokens = (list(column) for column in zip(*rows, strict=True))
    codes = bytes((finish or {}).get(number, 0) for number in numbers)
    stopped = [(row, tokens[row]) for row, number in enumerate(numbers) if codes[row] == FinishReason.STOP]
    return Outputs(
        epoch=3,
        step=step,
        numbers=np.array(numbers, "<u4").tobytes(),
        positions=np.array(positions, "<u4").tobytes(),
        counts=np.ones(len(rows), "<u2").tobytes(),
        tokens=np.array(tokens, "<i4").tobytes(),
        finish=codes if any(codes) else b"",
        stop_tokens=stopped,
        started=np.array([(number, 7) for number, position, _ in rows if position == 0], "<u4").tobytes(),
        drafts=np.array([(number, 0, 9, 2 + number) for number in finish or {}], "<u4").tobytes(),
    )


def random_steps(seed: int, num_steps: int = 60) -> list[Outputs]:
    """Requests come, grow by a token whenever they are scheduled, and go."""
    rng = random.Random(seed)
    lengths: dict[int, int] = {}
    next_number, steps = 0, []
    for step in range(num_steps):
        if rng.random() < 0.5 or not lengths:
            lengths[next_number] = 0
            next_number += 1
        chosen = [number for number in lengths if rng.random() < 0.7] or [next(iter(lengths))]
        rng.shuffle(chosen)
        finish = {number: rng.choice([1, 2]) for number in chosen if rng.random() < 0.05}
        steps.append(step_outputs(step, [(number, lengths[number], rng.randrange(9999)) for number in chosen], finish))
        for number in chosen:
            lengths[number] += 1
        for number in finish:
            del lengths[number]
    return steps


def journal_after(messages: list[Outputs]) -> list[object]:
    """All that a client knows after these messages."""
    journal = Journal()
    for number in range(60):
        journal.add(AddRequest(number, b"\1\0\0\0", SamplingParams(), 0), streaming=False, now=1.0)
    for message in messages:
        journal.apply(message, 2.0)
    read = map(journal.read, range(60))
    return [(p.token_ids.tolist(), *p[1:4], p.num_draft_tokens, p.num_accepted_tokens) for p in read]


@pytest.mark.parametrize("seed", range(20))
def test_a_client_cannot_tell_merged_outputs_from_single_ones(seed: int) -> None:
    steps = random_steps(seed)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(steps)), 4))
    parts = [steps[low:high] for low, high in zip([0, *cuts], [*cuts, len(steps)], strict=True)]
    assert journal_after([merge_outputs(part) for part in parts]) == journal_after(steps)


def test_merged_outputs_are_small() -> None:
    steps = [step_outputs(step, [(number, step, number) for number in range(10)]) for step in range(100)]
    merged = merge_outputs(steps)
    assert (merged.epoch, merged.step, len(merged.numbers) // 4) == (3, 99, 10)
    assert np.frombuffer(merged.counts, "<u2").tolist() == [100] * 10
    assert len(merged.tokens) == 4000


def test_a_gap_is_a_bug_and_not_sent() -> None:
    with pytest.raises(AssertionError, match=r"request \[5\]: tokens up to \[1\], then from \[2\] on"):
        merge_outputs([step_outputs(0, [(5, 0, 1)]), step_outputs(1, [(5, 2, 1)])])


def test_order_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_MERGED_BYTES", 2000)
    waiting = Backlog()
    assert waiting.head() is None
    waiting.append(RequestFailed(1, ErrorCode.INTERNAL, "x"))
    for step in range(400):
        waiting.append(step_outputs(step, [(2, step, step)]))
        if step == 250:
            waiting.append(CallDone(3))
    assert 0 < waiting.num_bytes < 400 * 14
    frames = []
    while (frame := waiting.head()) is not None:
        frames.append(decode_server_message(frame))
        waiting.pop_head()
    assert waiting.num_bytes == 0
    kinds = [type(frame) for frame in frames]
    assert kinds[0] is RequestFailed
    assert kinds.count(CallDone) == 1
    before = [frame for frame in frames[1 : kinds.index(CallDone)] if isinstance(frame, Outputs)]
    assert sum(len(frame.tokens) // 4 for frame in before) == 251
    assert 3 <= len(frames) - 2 <= 6
    tokens = b"".join(frame.tokens for frame in frames if isinstance(frame, Outputs))
    assert np.frombuffer(tokens, "<i4").tolist() == list(range(400))


def test_a_message_with_nothing_but_starts() -> None:
    only = Outputs(3, 1, b"", b"", b"", b"", started=bytes(8))
    assert merge_outputs([only, only]).started == bytes(16)
    assert merge_outputs([step_outputs(0, [(1, 0, 4)]), only]).tokens == b"\4\0\0\0"


def test_outputs_of_other_weights_stay_apart() -> None:
    """A merged message says one version of the weights for all its tokens."""
    waiting, journal = Backlog(), Journal()
    for step, version in enumerate([0, 0, 4, 4, 5]):
        outputs = step_outputs(step, [(1, step, 30 + step)])
        waiting.append(msgspec.structs.replace(outputs, weights_version=version))
    sent = []
    while (frame := waiting.head()) is not None:
        sent.append(decode_server_message(frame))
        waiting.pop_head()
    assert [(one.weights_version, len(one.tokens) // 4) for one in sent] == [(0, 2), (4, 2), (5, 1)]  # type: ignore[union-attr]
    journal.add(AddRequest(1, b"", SamplingParams(), 0), streaming=True, now=0.0)
    for one in sent:
        assert isinstance(one, Outputs)
        journal.apply(one, 1.0)
    assert journal.read(1).weights_versions == ((0, 0), (2, 4), (4, 5))
