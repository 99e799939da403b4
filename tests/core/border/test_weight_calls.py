"""The owner's calls on the weights: one update at a time, read by another thread; what fails changes nothing."""

import threading
from collections.abc import Callable, Iterator

import pytest

from core.border.weight_calls import WeightCalls
from core.executors.fake import FakeExecutor
from core.inputs import NewWeights
from ipc.errors import ModelFileError
from ipc.wire.messages import CallDone, CallFailed, ErrorCode
from ipc.wire.weights_messages import Sleep, UpdateMode, UpdateWeights, WakeUp, WeightsMark
from tests.core.running_engine import CONFIG, Running, limits, owner
from tests.placed import PREFIX


class Reader:
    """An executor that reads weights when it is told to."""

    why_fixed = ""

    def __init__(self, num_pieces: int = 0) -> None:
        """num_pieces: of memory that are to be taken before the first call."""
        self.may_read = threading.Event()
        self.num_pieces, self.num_looks = num_pieces, 0
        self.has_looked = threading.Event()
        self.num_forms = 0  # that are to be packed
        self.order = list[str]()

    @property
    def expects_weights(self) -> bool:
        return self.num_pieces > 0

    def take_memory_ahead(self) -> bool:
        assert threading.current_thread().name == "weights"
        self.num_looks += 1
        self.has_looked.set()
        self._use("memory", self.num_pieces)
        self.num_pieces -= self.num_pieces > 0
        return self.num_pieces > 0

    def pack_second_form(self) -> bool:
        assert threading.current_thread().name == "weights"
        self._use("form", self.num_forms)
        self.num_forms -= self.num_forms > 0
        return self.num_forms > 0

    def _use(self, what: str, count: int) -> None:
        self.order += [what] * (count > 0)

    def prepare_weights(self, path: str, version: int) -> WeightsMark:
        assert self.may_read.wait(10)
        if path == "bad":
            raise ModelFileError("bad: a tensor is missing")
        if path == "worse":
            raise RuntimeError("a bug")
        return WeightsMark(version, f"fingerprint of {path}", path, "")

    def wake_up(self) -> None:
        raise AssertionError("the engine does that")

    def use_weights(self, mark: WeightsMark) -> None:
        raise AssertionError("the engine does that")

    def sleep(self, level: int) -> None:
        raise AssertionError("the engine does that")


@pytest.fixture(autouse=True)
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PREFIX}core.border.weight_calls._REST_S", 0.0)


@pytest.fixture(name="reader")
def made() -> Reader:
    return Reader()


@pytest.fixture(name="calls")
def opened(reader: Reader) -> Iterator[WeightCalls]:
    calls = WeightCalls(reader, lambda: None)
    yield calls
    reader.may_read.set()
    calls.close()


def done(calls: WeightCalls) -> list[tuple[int, NewWeights | CallFailed]]:
    while not (found := calls.take_done()):
        pass
    return found


def test_one_update_at_a_time(calls: WeightCalls, reader: Reader) -> None:
    assert calls.begin(7, UpdateWeights(1, "one", UpdateMode.KEEP)) is None
    refused = calls.begin(8, UpdateWeights(2, "two"))
    assert refused is not None
    assert refused.code == ErrorCode.RESOURCE_EXHAUSTED
    reader.may_read.set()
    ((client, new),) = done(calls)
    assert isinstance(new, NewWeights)
    assert (client, new) == (7, NewWeights(1, WeightsMark(1, "fingerprint of one", "one", ""), UpdateMode.KEEP))
    assert calls.begin(8, UpdateWeights(3, "two")) is not None, "the engine does not use them yet"
    assert calls.end(new.mark)
    assert not calls.end(new.mark), "told once"
    assert calls.mark == new.mark
    assert calls.begin(8, UpdateWeights(4, "two")) is None
    ((_, second),) = done(calls)
    assert isinstance(second, NewWeights)
    assert second.mark.version == 2


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("bad", ErrorCode.INVALID_ARGUMENT, "bad: a tensor is missing"),
        ("worse", ErrorCode.INTERNAL, "the weights could not be read: RuntimeError: a bug"),
    ],
)
def test_after_a_failure_the_next_one_may_come(
    calls: WeightCalls, reader: Reader, path: str, code: ErrorCode, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reader.may_read.set()
    assert calls.begin(7, UpdateWeights(1, path)) is None
    assert done(calls) == [(7, CallFailed(1, code, text))]
    assert calls.mark is None
    assert calls.begin(7, UpdateWeights(2, "one")) is None
    assert isinstance(done(calls)[0][1], NewWeights)


def test_what_an_executor_cannot_do_is_refused(calls: WeightCalls, reader: Reader) -> None:
    without = WeightCalls(None, lambda: None)
    for failed in (without.begin(7, UpdateWeights(1, "one")), without.refusal(Sleep(1)), without.refusal(WakeUp(1))):
        assert failed is not None
        assert failed.code == ErrorCode.INVALID_ARGUMENT
    assert calls.refusal(Sleep(1, 2)) is calls.refusal(WakeUp(1)) is None
    assert calls.refusal(Sleep(1, 0)) is not None
    reader.why_fixed = "it is an encoder"
    refused = calls.refusal(Sleep(1, 2))
    assert refused is not None
    assert refused.message.endswith("cannot get them again: it is an encoder")
    assert calls.refusal(Sleep(1, 1)) is None


def test_memory_is_taken_while_no_call_waits(calls: WeightCalls, reader: Reader) -> None:
    """After an update that the engine uses, not after one that it may not use yet."""
    reader.may_read.set()
    assert calls.begin(7, UpdateWeights(1, "one")) is None
    ((_, new),) = done(calls)
    assert isinstance(new, NewWeights)
    reader.num_pieces = 3
    reader.has_looked.clear()
    calls.end(new.mark)
    while reader.num_pieces:
        assert reader.has_looked.wait(10)
    reader.num_pieces = 3
    reader.has_looked.clear()
    calls.note_done()
    while reader.num_pieces:
        assert reader.has_looked.wait(10)
    assert calls.begin(7, UpdateWeights(2, "two")) is None
    assert isinstance(done(calls)[0][1], NewWeights)


def test_forms_are_packed_before_memory_is_taken(calls: WeightCalls, reader: Reader) -> None:
    """Its size is only known then. A call that comes before they are all packed does not wait for them."""
    reader.may_read.set()
    assert calls.begin(7, UpdateWeights(1, "one")) is None
    ((_, new),) = done(calls)
    assert isinstance(new, NewWeights)
    reader.num_pieces, reader.num_forms = 2, 3
    calls.end(new.mark)
    while reader.num_pieces:
        pass
    assert reader.order == ["form"] * 3 + ["memory"] * 2
    reader.num_forms = 1 << 30
    calls.note_done()
    assert calls.begin(7, UpdateWeights(2, "two")) is None
    assert isinstance(done(calls)[0][1], NewWeights)
    assert reader.num_forms


def test_a_call_does_not_wait_for_the_rest_after_an_update(
    calls: WeightCalls, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PREFIX}core.border.weight_calls._REST_S", 1000.0)
    reader.may_read.set()
    for number in (1, 2):
        assert calls.begin(7, UpdateWeights(number, "one")) is None
        ((_, new),) = done(calls)
        assert isinstance(new, NewWeights)
        num_looks = reader.num_looks
        calls.end(new.mark)
    assert reader.num_looks == num_looks


def test_calls_of_other_kinds_do_not_begin_the_rest_again(
    calls: WeightCalls, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client makes such calls, as often as it likes."""
    monkeypatch.setattr(f"{PREFIX}core.border.weight_calls._REST_S", 0.1)
    reader.may_read.set()
    assert calls.begin(7, UpdateWeights(1, "one")) is None
    ((_, new),) = done(calls)
    assert isinstance(new, NewWeights)
    reader.num_forms = 3
    calls.end(new.mark)
    while reader.num_forms:
        calls.note_done()
        threading.Event().wait(0.01)


def test_forms_that_cannot_be_packed_end_no_call(
    calls: WeightCalls, reader: Reader, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    has_failed = threading.Event()

    def fail() -> bool:
        has_failed.set()
        raise MemoryError

    monkeypatch.setattr(reader, "pack_second_form", fail)
    reader.may_read.set()
    for number in (1, 2):
        assert calls.begin(7, UpdateWeights(number, "one")) is None
        ((_, new),) = done(calls)
        assert isinstance(new, NewWeights)
        has_failed.clear()
        calls.end(new.mark)
        assert has_failed.wait(10)
    calls.close()
    assert "matrices stay in one form, which is slower: MemoryError" in logged()


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_memory_that_cannot_be_taken_ends_no_call(
    error: Exception, reader: Reader, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    def fail() -> bool:
        reader.has_looked.set()
        raise error

    monkeypatch.setattr(reader, "take_memory_ahead", fail)
    reader.num_pieces = 1
    reader.may_read.set()
    calls = WeightCalls(reader, lambda: None)
    assert reader.has_looked.wait(10)
    for number in (1, 2):
        assert calls.begin(7, UpdateWeights(number, "one")) is None
        ((_, new),) = done(calls)
        assert isinstance(new, NewWeights)
        calls.end(new.mark)
    calls.close()
    assert f"no memory is taken for the next weights: {type(error).__name__}" in logged()


class Dozing(Reader, FakeExecutor):
    """It has memory to take when it has woken up."""

    def __init__(self) -> None:
        FakeExecutor.__init__(self, CONFIG)
        Reader.__init__(self)
        self.level = 0

    def sleep(self, level: int) -> None:
        self.level = level

    def wake_up(self) -> None:
        self.num_pieces, self.level = 1, 0


def test_memory_is_taken_after_the_engine_has_woken_up() -> None:
    """Not if it cannot wake up, because it has no weights."""
    executor = Dozing()
    executor.num_pieces = 1  # the thread is there from the start
    running = Running(limits(), executor=executor)
    try:
        with owner(running) as client:
            client.send(Sleep(1, 1))
            assert client.receive(CallDone).call == executor.level == 1
            assert executor.has_looked.wait(10)
            while executor.num_pieces:
                assert executor.has_looked.wait(10)
            client.send(WakeUp(2))
            assert client.receive(CallDone).call == 2
            assert not executor.level
            while executor.num_pieces:
                assert executor.has_looked.wait(10)
            client.send(Sleep(3, 2), WakeUp(4))
            assert client.receive(CallDone).call == 3
            assert client.receive(CallFailed).call == 4
            assert executor.level == 2
    finally:
        running.close()


def test_a_call_does_not_wait_for_the_rest_of_the_memory(reader: Reader) -> None:
    """Memory for the first update is taken from the start on, if the executor expects one."""
    reader.num_pieces = 1 << 30
    reader.may_read.set()
    calls = WeightCalls(reader, lambda: None)
    assert reader.has_looked.wait(10)
    assert calls.begin(7, UpdateWeights(1, "one")) is None
    assert isinstance(done(calls)[0][1], NewWeights)
    assert reader.num_pieces
    calls.close()
