"""redact: runs a capture again with its tokens renamed, so that its decisions are kept and its content is removed.

The renamed requests and results go through the real engine while it is captured. Each of its steps is compared with the
recorded one: the same rows, tokens per row, prefix hits, preemptions and free blocks. So the new file is a normal
capture that is known to lead to the same decisions. It keeps what decisions depend on: times, lengths, how much
requests share with one another, priorities.
"""

import os
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.batch.request import NO_ROW, Request
from core.batch.table import FREE_ROW
from core.capture.bounds import untrusted_file
from core.capture.engine import CapturedEngine
from core.capture.file import CaptureFile, Turn
from core.capture.output import CaptureOutput, Item, open_capture
from core.capture.recorded_executor import RecordedExecutor
from core.capture.records import TAGS, Checkpoint, Input, Step, decode_config, encode_config, encode_record
from core.capture.renaming import Renaming
from core.capture.restore import restore
from core.capture.snapshot import Snapshot
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.kv.block_names import rename_blocks
from core.proposers.offered import OfferedDrafts
from core.scheduling.adapter_slots import AdapterSlots
from core.scheduling.interface import SchedulerInterface
from core.scheduling.scheduler import Scheduler
from ipc.errors import CaptureFileError
from ipc.options.block_stores import redacted_stores
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, Int32s
from ipc.wire.block_roots import PLAIN_ROOT
from ipc.wire.messages import DECODE_ERRORS, AddRequest
from ipc.wire.pooling_messages import AddPooling

#: Fields of a Step that must be equal after renaming. The digest differs, because the plan has other tokens.
_DECIDED = ("rows", "counts", "removed_rows", "added", "num_preemptions", "num_waiting", "num_free_blocks")


class Redacted(NamedTuple):
    """What was redacted."""

    num_steps: int
    num_requests: int


class _RenamedExecutor(RecordedExecutor):
    """Recorded results with renamed tokens. scheduler: set before the first step."""

    def __init__(self, file: CaptureFile, renaming: Renaming) -> None:
        super().__init__(file.header.model)
        self.scheduler: SchedulerInterface | None = None
        self._renaming = renaming

    def tokens_of(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().tokens_of(plan)
        assert self.scheduler is not None, "a step before the scheduler was set"
        _, rows, tenancies = self.scheduler.batch.in_flight[0]
        return self._renaming.result(output, self.scheduler.table, rows, tenancies)


class _Log:
    """The records of the last step, with a checkpoint if the original has one."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.step: Step | None = None
        self.checkpoint: Checkpoint | None = None
        self.wants_checkpoint = False

    def add(self, record: Input | Step) -> None:
        if isinstance(record, Step):
            self.step = record
        else:
            self.inputs.append(record)

    def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
        self.checkpoint = Checkpoint(num_steps, num_inputs, snapshot.encode())


def redact(file: CaptureFile, path: str) -> Redacted:
    """Write a capture without its content to a new file. An incomplete file is removed again.

    Errors: CaptureFileError for a capture that leads to other decisions here, or whose decisions depend on its content;
    ConfigError, OSError for a file that cannot be written.
    """
    with untrusted_file(file.path):
        redaction = _Redaction(file)
    output = CaptureOutput(path, open_capture(path), redaction.header)
    try:
        for items in redaction.items():
            output.write(items)
        if file.close is not None:
            output.finish()
    except BaseException:
        os.unlink(path)
        raise
    finally:
        output.close()
    return Redacted(redaction.num_steps, redaction.num_requests)


class _Redaction:
    """One capture, and its engine with renamed tokens."""

    def __init__(self, file: CaptureFile) -> None:
        self.num_steps = self.num_requests = 0
        self._file = file
        config, model = _config(file), file.header.model
        if config.speculative_config is not None:
            raise CaptureFileError(
                f"{file.path}: its engine guessed tokens ahead (speculative_config), and which guesses are made "
                "depends on which tokens repeat, so no renaming keeps the decisions"
            )
        self._first = file.checkpoint(file.checkpoints[0]) if file.begins_inside else None
        state: list[Any] | None = None if self._first is None else restore(self._first.state)
        stops, live = set[int](), [] if state is None else check_state(state)
        for request in live:
            stops.update((request.sampling and request.sampling.stop_token_ids) or ())
        inputs = [message for turn in file.turns() for _, message in turn.inbox]
        inputs += [one.message for one in file.last_inputs()]
        submitted = [message for message in inputs if isinstance(message, AddRequest | AddPooling)]
        for message in submitted:
            if isinstance(message, AddRequest):
                stops.update(message.params.stop_token_ids or ())
        self._renaming = Renaming(model.vocab_size, model.eos_token_ids, stops)
        weights = {self._renaming.tokens.word(name): weight for name, weight in config.client_weights.items()}
        config = msgspec.structs.replace(
            config,
            client_weights=weights,
            lora_modules={},
            capture_rotate_bytes=0,
            capture_keep_files=0,
            **redacted_stores(config),
        )
        self.header = msgspec.structs.replace(file.header, config=encode_config(config), is_redacted=True)
        self._executor, self._log = _RenamedExecutor(file, self._renaming), _Log()
        self._engine = CapturedEngine(config, self._executor, self._log, file.header.epoch)
        if state is not None and self._first is not None:
            for message in submitted:
                self._renaming.learn(message)
            rename_state(state, self._renaming, weights)
            self._engine.go_on(state, self._first)
        self._executor.scheduler = self._engine.engine.scheduler

    def items(self) -> Iterator[list[Item]]:
        """Yield the records of the new file, a few at a time. Errors: CaptureFileError."""
        if self._first is not None:
            with untrusted_file(self._file.path):
                state = Snapshot(self._engine.engine.state()).encode()
            first = msgspec.structs.replace(self._first, state=state)
            yield [(TAGS[Checkpoint], encode_record(first))]
        places = {place.num_steps for place in self._file.checkpoints}
        for turn in self._file.turns():
            self._log.wants_checkpoint = turn.step_index + 1 in places
            with untrusted_file(self._file.path):
                items = self._step(turn)
            yield items
        for one in self._file.last_inputs():
            record = msgspec.structs.replace(one, message=self._renaming.message(one.message))
            yield [(TAGS[Input], encode_record(record))]

    def _step(self, turn: Turn) -> list[Item]:
        recorded, log = turn.step, self._log
        if turn.has_columns:
            self._engine.write_columns()
        self._executor.feed(recorded)
        log.inputs, log.step, log.checkpoint = [], None, None
        inbox = [(client, self._renaming.message(message)) for client, message in turn.inbox]
        try:
            self._engine.step(inbox, recorded.now_ns)
        except Exception as error:  # any type: the captured engine may also have failed in this step
            if not recorded.error:
                raise CaptureFileError(f"{self._file.path}: step {turn.step_index}: {error!r}") from None
        step = log.step
        assert step is not None, f"step {turn.step_index} was not logged"
        different = [name for name in _DECIDED if getattr(step, name) != getattr(recorded, name)]
        if different and not recorded.error:
            raise CaptureFileError(
                f"{self._file.path}: step {turn.step_index} is decided differently ({', '.join(different)}) under "
                "other names: this version of the engine decides differently, or the decision depends on the content"
            )
        error = recorded.error.partition(":")[0]
        step = msgspec.structs.replace(step, elapsed_ns=recorded.elapsed_ns, times=recorded.times, error=error)
        inputs = [
            msgspec.structs.replace(one, received_ns=received_ns)
            for one, received_ns in zip(log.inputs, turn.received_ns, strict=True)
        ]
        self.num_steps += 1
        self.num_requests += sum(isinstance(message, AddRequest) for _, message in inbox)
        records = [*inputs, step, *([log.checkpoint] if log.checkpoint else [])]
        return [(TAGS[type(record)], encode_record(record)) for record in records]


def _config(file: CaptureFile) -> ResolvedConfig:
    try:
        return decode_config(file.header)
    except DECODE_ERRORS as error:
        raise CaptureFileError(
            f"{file.path}: written by engine-core {file.header.engine_version} with unknown options: {error}"
        ) from None


# rename_state: removes the content from an engine's state at a checkpoint: its live requests and its prefix cache.


def check_state(state: list[Any]) -> list[Request]:
    """Return the live requests of a state that can be renamed. Errors: CaptureFileError that says why it cannot."""
    scheduler: Scheduler = state[1]
    requests = scheduler.live_requests()
    if any(request.searches for request in requests):
        raise CaptureFileError("a beam search is running at its first checkpoint, and its beams cannot be renamed")
    return requests


def rename_state(state: list[Any], renaming: Renaming, weights: Mapping[str, float]) -> None:
    """Rename all tokens, salts and tenants in an EngineCore.state() that no engine uses yet.

    weights: of clients and tenants, by their new names.
    """
    _, scheduler, _, plans = state
    _blank_rest(state, {id(request) for request in scheduler.live_requests()}, renaming)
    cache, table = scheduler.batch.prefix_cache, scheduler.table
    states: dict[int, bytes] = {}  # by content number: state after its block
    for request in scheduler.live_requests():
        request.params = renaming.any_params(request.params)
        request.sampling = None if request.sampling is None else renaming.params(request.sampling)
        request.root, request.seed = renaming.root(request.root), 0
        request.tenant = renaming.tokens.word(request.tenant)
        request.adapter = renaming.adapter(request.adapter)
        request.features = renaming.features(request.features)
        request.block_hashes.clear()
        request.first_key = 0
        if request.row == NO_ROW:
            request.token_ids, _ = renaming.tokens.name_all(renaming.begin(request.root), request.token_ids)
            cache.prepare(request)
        else:
            _rename_row(scheduler, renaming, request.row, states)
            request.token_ids = table.token_ids(request.row)

    live_rows = scheduler.running
    table.tokens.blank_rest(live_rows, table.num_tokens[live_rows])
    table.content[table.tenancy == FREE_ROW] = 0  # of an earlier row, or the root of its request

    def tokens_of(content: int, parent: int, tokens: Int32s) -> Int32s:
        if parent not in states:  # a root, or a block that was evicted before this one
            states[parent] = renaming.begin(parent)
        names, states[content] = renaming.tokens.name_all(states[parent], tokens)
        return names

    def tokens_from(root: int, tokens: Int32s) -> Int32s:
        return renaming.tokens.name_all(renaming.begin(root), tokens)[0]

    rename_blocks([scheduler.pool.names, scheduler.batch.host_cache.names], renaming.root, tokens_of)
    if scheduler.exchange is not None:
        scheduler.exchange.rename(renaming.root, tokens_from)
    scheduler.pins.rename(renaming.root, tokens_from, renaming.tokens.word)
    scheduler.batch.stop_check.rename(renaming.stop)
    scheduler.rename_tenants(renaming.tokens.word, weights)
    scheduler.encoder_inputs.rename(renaming.feature)
    plans[:] = map(_without_content, plans)


def _without_content(plan: SchedulerOutput) -> SchedulerOutput:
    """Return a plan in flight without what has been read already: the starting requests' tokens and features, and its
    drafts, which no longer decide anything.
    """
    return msgspec.structs.replace(
        plan,
        added=[],
        added_pooling=[],
        adapters=[],
        features=[],
        draft_token_ids=plan.draft_token_ids * 0,
        scheduled_encoder_inputs=[],
        freed_encoder_inputs=[],
        image_parts=[],
    )


def _blank_rest(state: list[Any], live: Set[int], renaming: Renaming) -> None:
    """Clear what has content apart from the live requests (by id): finished ones still in queues, drafts, slots."""
    for one in Snapshot(state).objects():
        match one:
            case Request() if id(one) not in live:
                one.token_ids, one.block_hashes, one.features = NO_INT32S, [], []
                one.params, one.sampling = SamplingParams(), None
                one.tenant, one.adapter, one.seed, one.root, one.first_key, one.pins = "", None, 0, PLAIN_ROOT, 0, ()
            case AdapterSlots():
                one.rename(renaming.digest)
            case OfferedDrafts():
                one.blank()
            case _:
                pass


def _rename_row(scheduler: Scheduler, renaming: Renaming, row: int, states: dict[int, bytes]) -> None:
    """Rename the tokens of a running request, and record the states after its named blocks."""
    table, size = scheduler.table, scheduler.block_size
    request = table.request[row]
    assert request is not None, f"row {row} is free"
    named = int(table.num_named_blocks[row])
    if not named:
        table.content[row] = request.root  # its first block follows this
    contents = scheduler.pool.names.content[table.blocks.read(row, 0, named)].tolist() if named else []
    if named:
        contents[: int(table.num_released[row])] = [0] * int(table.num_released[row])  # others may have these blocks
        contents[-1] = int(table.content[row])
    old, state, parts = table.token_ids(row), renaming.begin(request.root), []
    for index, content in enumerate(contents):
        names, state = renaming.tokens.name_all(state, old[index * size : (index + 1) * size])
        parts.append(names)
        if content:
            states[content] = state
    names, _ = renaming.tokens.name_all(state, old[named * size :])
    new = np.concatenate([*parts, names])
    table.tokens.set(np.full(len(new), row), np.arange(len(new)), new)
