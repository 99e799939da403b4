"""`engine-core chat`, `run` and `prove`: on the demo model's tokenizer and made-up tokens."""

import contextlib
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator

import pytest

from frontend.engine.process import EngineProcess
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from tests.fake_options import fake_options
from tests.tools.test_cli import command, environment
from tools.cli import main as cli
from tools.lab import prove

VOCAB = 49_152


@pytest.fixture(name="engine", scope="module")
def an_engine() -> Iterator[EngineProcess]:
    """Made-up tokens of the demo model's vocabulary, under its chat template."""
    config = EngineConfig(
        executor="fake", model=str(resolve_model(None)), executor_options=fake_options(vocab_size=VOCAB)
    )
    with EngineProcess(config) as process:
        yield process


class Chat:
    """A chat in a terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command("chat", *arguments),
            env=environment(),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def until(self, pattern: str) -> str:
        end = time.monotonic() + 20
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, (pattern, self.text[-2000:])
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.master, 65_536).decode(errors="replace")
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def say(self, line: str) -> None:
        os.write(self.master, line.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture(name="chat")
def a_chat(engine: EngineProcess) -> Iterator[Chat]:
    chat = Chat("--connect", engine.address, "--max-tokens", "8", "--ignore-eos")
    yield chat
    chat.close()


def test_a_conversation(chat: Chat) -> None:
    chat.until("> ")
    chat.say("hello\n")
    first = chat.until(r"\(8 tokens, [\d.]+ a second\)")
    chat.until("> ")
    chat.say("hello\n")
    second = chat.until(r"\(8 tokens")
    assert answer(first) != answer(second)  # the second question has the first behind it
    chat.until("> ")
    chat.say("/clear\n")
    chat.until("forgotten")
    chat.until("> ")
    chat.say("hello\n")
    assert answer(chat.until(r"\(8 tokens")) == answer(first)
    chat.until("> ")
    chat.say("/help\n")
    chat.until(r"/bye +leave")
    chat.until("> ")
    chat.say("/bye\n")
    assert chat.process.wait(20) == 0


def answer(shown: str) -> str:
    return shown.split("hello", 1)[1].rsplit("(8 tokens", 1)[0].strip()


def test_ctrl_c_ends_the_answer_and_not_the_chat(engine: EngineProcess) -> None:
    chat = Chat("--connect", engine.address, "--max-tokens", "8000", "--ignore-eos", "--quiet")
    try:
        chat.until("> ")
        chat.say("hello\n")
        chat.until(r"hello\r\n.{40}")
        os.killpg(chat.process.pid, 2)
        chat.until(r"\n> ")
        chat.say("\x04")
        assert chat.process.wait(20) == 0
    finally:
        chat.close()


def test_a_full_context_names_clear(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(("Tell me more. " * 200_000, "/bye"))
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert cli(["chat", "--connect", engine.address]) == 0
    error = capsys.readouterr().err
    assert re.search(r"error: .* at most \d+ fit: the maximum context length is .*; /clear begins a new conv", error)


def run(engine: EngineProcess, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    given = command("run", "--connect", engine.address, "--max-tokens", "8", "--ignore-eos", *words)
    return subprocess.run(given, env=environment(), input=stdin, capture_output=True, text=True, check=False)


def test_a_pipe_gets_the_answer_once_and_nothing_else(engine: EngineProcess) -> None:
    done = run(engine, stdin="hello\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 8
    assert "tokens" not in done.stdout
    assert run(engine, stdin="").returncode == 2
    assert run(engine, "hello you").stdout == run(engine, stdin="hello you").stdout != done.stdout


def test_options_beside_connect_are_refused(engine: EngineProcess) -> None:
    done = run(engine, "some/model", stdin="hello")
    assert done.returncode == 1
    assert "leave out --model" in done.stderr


# --- prove ----------------------------------------------------------------------------------------------------------


def test_prove_compares_and_preempts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["prove", "--executor", "fake", "--prompts", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("24/24 identical bits") == 3
    assert re.search(r"identical bits, [1-9]\d* preemptions", shown), shown
    assert re.search(r"identical bits, [1-9]\d* tokens found", shown), shown


def test_prove_sees_one_other_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ask = prove.ask_together

    def disturbed(llm: object, prompts: list[list[int]]) -> list[prove.Answer]:
        answers = ask(llm, prompts)  # type: ignore[arg-type]
        if len(prompts) > 1:
            first = answers[0]
            answers[0] = first._replace(token_ids=(first.token_ids[0] ^ 1, *first.token_ids[1:]))
        return answers

    monkeypatch.setattr(prove, "ask_together", disturbed)
    assert cli(["prove", "--executor", "fake", "--prompts", "3"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("2/3 identical bits") == 3
    assert "they differ" in shown


def test_prompts_are_the_same_at_each_call() -> None:
    prompts = prove.make_prompts(64)
    assert prompts == prove.make_prompts(64)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert max(map(len, prompts)) + prove.NUM_TOKENS <= prove.MODEL_LEN
