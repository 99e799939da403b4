"""Grammars are compiled by a process of their own first: what it refuses, what ends it, and how it goes on."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.grammars.checker import CheckedGrammars
from core.grammars.grammars import Grammars
from core.grammars.vocabulary import build_vocabulary
from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.machine import bounded_process
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import AddRequest
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, make_grammars, schema, structured, tokenizer_files
from tests.placed import PREFIX

Make = Callable[..., CheckedGrammars]
#: It takes two tenths of a second, and tens of megabytes.
_LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
LARGE = structured(json={"anyOf": [{**_LARGE, "additionalProperties": {"const": i}} for i in range(4)]})


@pytest.fixture
def make() -> Iterator[Make]:
    made = list[CheckedGrammars]()

    def one(grammars: Grammars | None = None, **bounds: int) -> CheckedGrammars:
        made.append(CheckedGrammars(grammars or make_grammars(), **bounds))
        return made[-1]

    yield one
    for checked in made:
        checked.close()


def request(params: StructuredOutputsParams | None) -> AddRequest:
    return AddRequest(1, b"\1\0\0\0", SamplingParams(structured_outputs=params), 0)


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: the signal is for one, which stops the others."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        task.read_text().rsplit(")", 1)[1].split()[0] != "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.001)


def pid_of(checked: CheckedGrammars) -> int:
    assert checked.process is not None
    return checked.process.process.pid


def join_loading() -> None:
    """Wait until no thread builds a vocabulary."""
    for thread in threading.enumerate():
        if thread.name == "vocabulary":
            thread.join()


def test_what_passes_is_compiled_here_and_what_does_not_is_refused_with_its_reason(make: Make) -> None:
    grammars = make_grammars()
    checked = make(grammars)
    good, bad = request(structured(json=schema(a={"type": "integer"}))), request(structured(regex="("))
    assert checked.needs(good)
    assert not checked.needs(request(None))
    assert not checked.prepare(good)
    assert not checked.needs(good)
    with pytest.raises(InvalidRequestError, match=r"(?s)\(regex\) cannot be used: .*unclosed group") as refusal:
        checked.prepare(bad)
    with pytest.raises(InvalidRequestError) as ours:
        grammars.prepare(bad)
    assert str(refusal.value) == str(ours.value)
    before = pid_of(checked)
    checked.prepare(request(structured(regex="[a-c]+")))
    assert pid_of(checked) == before
    checked.close()
    assert not Path(f"/proc/{before}").exists()
    with pytest.raises(InvalidRequestError, match="the engine is stopping"):
        checked.prepare(request(structured(regex="[d-f]+")))


def test_the_process_has_less_priority_than_the_engine_from_its_start_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()
    run = bounded_process.run_package

    def run_slowly(*arguments: Any) -> Any:
        process = run(*arguments)
        os.kill(process.pid, signal.SIGSTOP)  # before its interpreter has imported anything
        return process

    monkeypatch.setattr(bounded_process, "run_package", run_slowly)
    checked = make()

    def look() -> None:
        while checked.process is None:
            time.sleep(0.001)
        found.append(os.getpriority(os.PRIO_PROCESS, pid_of(checked)))
        os.kill(pid_of(checked), signal.SIGCONT)

    thread = threading.Thread(target=look)
    thread.start()
    checked.prepare(request(structured(regex="a+")))  # in this thread: the process ends with the one that starts it
    thread.join()
    for task in Path(f"/proc/{pid_of(checked)}/task").iterdir():  # also of the thread that compiles
        found.append(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    assert set(found) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)}
    assert len(found) > 2


def test_a_grammar_that_takes_too_long_or_too_much_is_refused_and_the_next_one_is_not(make: Make) -> None:
    for bounds, text in (
        ({"max_cpu_ms": 20}, "takes more than 20 ms of CPU time"),
        ({"max_memory_bytes": 8 << 20}, "more than 8 MiB of memory|too much memory"),
    ):
        grammars = make_grammars()
        checked = make(grammars, **bounds)
        with pytest.raises(InvalidRequestError, match=text):
            checked.prepare(request(LARGE))
        assert not grammars._cache, "it was compiled in the engine"
        checked.prepare(small := request(structured(choice=["a", "b"])))
        assert not checked.needs(small)


def test_a_grammar_that_has_ended_the_process_is_not_tried_again(make: Make) -> None:
    checked = make(max_cpu_ms=20)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="takes more than 20 ms of CPU time"):
            checked.prepare(request(LARGE))
        assert checked.process is None
    checked.prepare(request(structured(regex="a+")))
    before = pid_of(checked)
    with pytest.raises(InvalidRequestError, match="takes more than 20 ms of CPU time"):
        checked.prepare(request(LARGE))
    assert pid_of(checked) == before


def test_a_process_that_was_killed_is_replaced(make: Make) -> None:
    checked = make()
    checked.prepare(request(structured(regex="a+")))
    before = pid_of(checked)
    os.kill(before, signal.SIGKILL)
    checked.prepare(request(structured(regex="b+")))
    assert pid_of(checked) != before


def test_it_ends_when_its_engine_closes_the_socket(make: Make) -> None:
    checked = make()
    checked.prepare(request(structured(regex="a+")))
    assert checked.process is not None
    checked.process.channel.close()
    assert checked.process.process.wait(30) == 0


@pytest.mark.timeout(60)
def test_the_engine_ends_though_its_process_does_not_answer(make: Make) -> None:
    checked, errors = make(), list[str]()
    checked.prepare(request(structured(regex="a+")))
    stop(pid_of(checked))

    def prepare() -> None:
        with pytest.raises(InvalidRequestError) as error:
            checked.prepare(request(structured(regex="b+")))
        errors.append(str(error.value))

    thread = threading.Thread(target=prepare)
    thread.start()
    while not checked._is_asking:
        time.sleep(0.001)
    checked.close()
    thread.join()
    assert errors == ["the engine is stopping"]


def test_no_process_is_started_for_what_the_engine_cannot_do(make: Make) -> None:
    checked = make(Grammars(tokenizer_files, VOCAB_SIZE, ()))
    with pytest.raises(UnsupportedParameterError, match="need a model with an EOS token"):
        checked.prepare(request(structured(regex="a")))
    assert checked.process is None
    checked = make(Grammars(dict, VOCAB_SIZE, (EOS,)))
    with pytest.raises(UnsupportedParameterError, match="the model has no tokenizer"):
        checked.prepare(request(structured(regex="a")))


def test_an_idle_engine_makes_its_vocabulary_once_and_starts_no_process(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads, made = 0, list[object]()

    def read() -> dict[str, bytes]:
        nonlocal num_reads
        num_reads += 1
        return tokenizer_files()

    def build(*arguments: Any) -> object:
        made.append(build_vocabulary(*arguments))
        return made[-1]

    monkeypatch.setattr(f"{PREFIX}core.grammars.grammars.build_vocabulary", build)
    returned: list[int] = []
    monkeypatch.setattr(f"{PREFIX}kernels.memory.free_memory.return_free_memory", lambda: returned.append(len(made)))
    grammars = Grammars(read, VOCAB_SIZE, (EOS,))
    checked = make(grammars)
    for _ in range(3):
        checked.load_ahead()
        join_loading()
        assert (num_reads, len(made)) == (1, 1)
        assert returned == [1], "what was needed for a moment goes back to the system, once"
    assert checked.process is None
    checked.prepare(request(structured(regex="a+")))
    os.kill(pid_of(checked), signal.SIGKILL)
    checked.prepare(request(structured(regex="b+")))
    assert (num_reads, len(made)) == (1, 1), "a new process gets what was read"


def test_an_idle_engine_without_a_vocabulary_says_nothing(make: Make) -> None:
    reads: list[bool] = []

    def read() -> dict[str, bytes]:
        reads.append(True)
        return {}

    checked = make(Grammars(read, VOCAB_SIZE, (EOS,)))
    checked.load_ahead()
    join_loading()  # warnings are errors: an exception in the thread would fail this test
    assert reads
    with pytest.raises(UnsupportedParameterError, match="the model has no tokenizer"):
        checked.prepare(request(structured(regex="a")))
