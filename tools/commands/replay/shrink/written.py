"""What `replay shrink` writes: the workload as a capture, and as a test for pytest."""

import pprint
from collections.abc import Sequence

import msgspec

from core.capture.engine import CapturedEngine, make_header
from core.capture.output import CaptureOutput, Item, open_capture
from core.capture.records import TAGS, Input, Step, encode_record
from core.capture.snapshot import Snapshot
from core.inputs import EngineInput
from ipc.log_lines import counted
from ipc.version import VERSION
from tools.commands.replay.shrink.mirrored_oracle import MirroredOracle
from tools.commands.replay.shrink.workload import Workload, literal
from tools.commands.replay.what_if.recording import Recorded
from tools.commands.replay.what_if.simulation import tokens_of

_STEP_NS = 1_000_000
_MAX_STEPS = 100_000
_MAX_IDLE_STEPS = 100
#: "" in a checkout, "engine_core." in a wheel.
_HOME_PACKAGE = __name__.removesuffix("tools.commands.replay.shrink.written")

_TEST = '''"""What `engine-core replay shrink` left of {name}: it fails when {said}"""

from {home}tools.commands.replay.fails_when import FailsWhen
from {home}tools.commands.replay.shrink.trial import Trial
from {home}tools.commands.replay.shrink.workload import make_workload

OPTIONS = {options}
MODEL = {model}
REQUESTS = {requests}


def test_it_does_not_fail_any_more() -> None:
    condition = FailsWhen({condition!r})
    values = Trial(condition).values(make_workload(OPTIONS, MODEL, REQUESTS))
    assert not condition.holds(values), values
'''


class _Log:
    """The records of a run, in their order."""

    wants_checkpoint = False

    def __init__(self) -> None:
        self.items: list[Item] = []

    def add(self, record: Input | Step) -> None:
        if isinstance(record, Step):
            record = msgspec.structs.replace(record, elapsed_ns=_STEP_NS, times=b"")
        self.items.append((TAGS[type(record)], encode_record(record)))

    def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
        raise AssertionError("none is wanted")


def write_capture(workload: Workload, path: str) -> None:
    """Write a new capture of the workload, in which each step takes a millisecond. It ends with the requests or with an
    error.

    Errors: ConfigError, OSError.
    """
    config, info, requests = workload.config, workload.info, list(workload.requests)
    executor, log = MirroredOracle(config, info, tokens_of(requests)), _Log()
    engine = CapturedEngine(config, executor, log)
    executor.table = engine.engine.scheduler.table
    output = CaptureOutput(path, open_capture(path), make_header(config, info, VERSION, 0))
    try:
        _run(engine, requests)
    except Exception as error:  # the engine's exception is the last record
        if not log.items:
            raise AssertionError(f"nothing was recorded before {error!r}") from error
    finally:
        output.write(log.items)
        output.close()


def _run(engine: CapturedEngine, requests: list[Recorded]) -> None:
    now_ns, num_idle = requests[0].received_ns, 0
    for _ in range(_MAX_STEPS):
        inbox: list[tuple[int, EngineInput]] = []
        while requests and requests[0].received_ns <= now_ns:
            one = requests.pop(0)
            inbox.append((one.client, one.message))
        before = engine.engine.scheduler.stats.num_steps
        engine.step(inbox, now_ns)
        num_idle = num_idle + 1 if engine.engine.scheduler.stats.num_steps == before else 0
        if not requests and (not engine.has_unfinished or num_idle > _MAX_IDLE_STEPS):
            return
        now_ns += _STEP_NS
        if not engine.has_unfinished and requests:
            now_ns = max(now_ns, requests[0].received_ns)


def pytest_text(workload: Workload, condition: str, name: str) -> str:
    """Return the text of a test that passes as soon as the condition does not hold. name: of the original capture."""
    options, model, requests = (
        pprint.pformat(part, width=110, compact=True, sort_dicts=False) for part in literal(workload)
    )
    texts = {"options": options, "model": model, "requests": requests}
    said = {"name": _in_docstring(name), "said": _in_docstring(condition)}
    return _TEST.format(**said, condition=condition, home=_HOME_PACKAGE, **texts)


def _in_docstring(text: str) -> str:
    """Return a text that cannot end the docstring around it: the name is that of an untrusted file."""
    return ascii(text)[1:-1].replace("\\", "/").replace('"', "'")


def describe(requests: Sequence[Recorded]) -> str:
    """Return how many requests and tokens there are."""
    num_prompt = sum(len(one.message.prompt_token_ids) // 4 for one in requests)
    clients = {one.client for one in requests}
    sent = f"{counted(len(requests), 'request')} of {counted(len(clients), 'client')}"
    return f"{sent}, {counted(num_prompt, 'prompt token')}"
