"""The programs, run as users run them: real processes, the fake executor."""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.llm import LLM
from ipc.errors import ConfigError, EngineDeadError
from ipc.params.sampling_params import SamplingParams
from tests.fake_tokens import fake_tokens
from tests.placed import PREFIX, placed
from tests.preloaded.start import EXEC
from tools.cli import main
from tools.commands import serve

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 32_000
LONG = 200_000  # tokens; a minute of the fake executor


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "engine_core", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm"}


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(), input=stdin, capture_output=True, text=True, check=False
    )


@contextlib.contextmanager
def serving(address: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its address."""
    server = subprocess.Popen(
        command("serve", "--executor", "fake", "--listen", address, *options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        line = server.stdout.readline()
        assert line.startswith("engine-core: ready at "), line + server.stderr.read()
        assert "numerics L2" in line
        yield server, line.split()[3]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        server.stderr.close()


def wait_for_running(llm: LLM, count: int) -> None:
    end = time.monotonic() + 20
    while llm.statistics().num_running != count:
        assert time.monotonic() < end, llm.statistics()
        time.sleep(0.01)


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.checkout  # the Makefile
@pytest.mark.parametrize("prompt", ["costs $5?", 'it\'s "$HOME" `x` $(shell y)', "-v"])
def test_make_run_passes_the_prompt_as_it_stands(prompt: str, tmp_path: Path) -> None:
    program = tmp_path / "engine-core"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    stamp = tmp_path / "stamp"
    stamp.touch()
    words = ["make", "--silent", "run", f"BIN={tmp_path}", f"STAMP={stamp}", f"PROMPT={prompt}"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["generate", "--", prompt]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("generate", "serve", "bench", "version"))
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("engine-core ")


def test_a_command_is_imported_only_when_called() -> None:
    code = placed("import sys, tools.cli; print(*sys.modules)")
    loaded = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert {"zmq", "rich", "uvloop", "tokenizers", f"{PREFIX}tools.commands.generate"} & set(
        loaded.stdout.split()
    ) == set()


def test_control_imports_neither_the_engine_nor_a_session_nor_numpy() -> None:
    """They would take as long as all the rest of a short call."""
    code = placed("import sys, tools.commands.control; print(*sys.modules)")
    loaded = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    names = {name.removeprefix(PREFIX) for name in loaded.stdout.split()}
    assert "frontend.client.call_client" in names
    assert {
        "core",
        "jinja2",
        "numpy",
        "tokenizers",
        "frontend.client.client",
        "frontend.fleet",
        "frontend.session",
        "frontend.text",
    } & names == set()


def test_an_unknown_command_or_flag_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["sreve"])
    assert exit_.value.code == 2
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--max-num-seq", "3"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "'serve'" in error
    assert "unknown argument --max-num-seq; did you mean --max-num-seqs?" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "--executor", "fake", "--max-num-seqs", "0"], "max_num_seqs must be an integer from 1"),
        (["generate", "--executor", "fake", "--top-p", "2"], "top_p must be in [0, 1], got 2.0"),
        (["generate", "--model", "/nowhere"], "'/nowhere' is not a file or folder on this machine"),
        (["generate", "--connect", "ipc:///x", "--block-size", "8"], "leave out --block-size"),
        (["serve", "--executor", "fake", "--listen", "ipc://x"], "needs an absolute path"),
        (["bench", "latency", "--only", "lat2"], "known are lat1, batch8"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_1(
    arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if " error: " in line]
    assert line.startswith("engine-core: error: ")
    assert expected in line


# --- generate -------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_quiet(tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    words = ["--max-tokens", str(LONG // 2), "--json", "--capture", str(capture), "5 6"]
    process = subprocess.Popen(
        command("generate", "--executor", "fake", *words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while not capture.exists() or capture.stat().st_size < 20_000:  # it works on the request: its start is over
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the engine too
    out, error = process.communicate(timeout=20)
    told = f"engine-core: every prompt and answer is captured to {capture}\n"
    assert (process.returncode, out, error) == (130, "", told)


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        command("generate", "--executor", "fake", "--max-tokens", "50"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 141
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("redirection", "status", "text"),
    [
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
        (">&-", 0, ""),
        ("> /dev/full", 1, "engine-core: error: cannot write the output: No space left on device"),
    ],
)
def test_an_output_that_fails_is_one_line_at_most(redirection: str, status: int, text: str) -> None:
    words = command("generate", "--executor", "fake", "--max-tokens", "300", "--ignore-eos", "--quiet", "5", "6")
    script = f"{shlex.join(words)} {redirection}"
    result = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    assert result.stderr.splitlines() == ([text] if text else [])


def test_a_full_disk_is_one_line_for_every_command() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(command("version"), env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "engine-core: error: cannot write the output: No space left on device\n"


def test_what_stdout_cannot_encode_is_escaped() -> None:
    code = placed("import sys; from tools import cli; cli._make_streams_usable(); print('caf\xe9')")
    narrow = {**environment(), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], env=narrow, capture_output=True, text=True, check=True)
    assert result.stdout == "caf\\xe9\n"


# --- serve ----------------------------------------------------------------------------------------------------------


def test_two_clients_of_a_server_get_their_own_tokens(tmp_path: Path) -> None:
    with serving(f"ipc://{tmp_path}/s") as (server, address):
        prompts = [[40 + k, 50] for k in range(2)]
        clients = [
            subprocess.Popen(
                command("generate", "--connect", address, "--max-tokens", "300", "--json", " ".join(map(str, prompt))),
                env=environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for prompt in prompts
        ]
        for client, prompt in zip(clients, prompts, strict=True):
            out, _ = client.communicate(timeout=30)
            (request,) = json.loads(out)["requests"]
            assert request["token_ids"] == fake_tokens(prompt, 300, VOCAB)[: len(request["token_ids"])]
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    assert list(tmp_path.iterdir()) == [], "the socket and its lock are gone"


def test_sigterm_drains(tmp_path: Path) -> None:
    with serving(f"ipc://{tmp_path}/s") as (server, address), LLM(connect=address) as llm:
        results = []
        params = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
        running = threading.Thread(target=lambda: results.extend(llm.generate([[5, 6]], params, use_tqdm=False)))
        running.start()
        wait_for_running(llm, 1)
        server.send_signal(signal.SIGTERM)
        running.join(30)
        assert server.wait(20) == 0
        assert [len(result.outputs[0].token_ids) for result in results] == [3000]
        assert results[0].outputs[0].token_ids == fake_tokens([5, 6], 3000, VOCAB)


def test_answers_that_a_drain_lets_finish_are_a_success(tmp_path: Path) -> None:
    """The engine ends with them, so there are no statistics after them."""
    with serving(f"ipc://{tmp_path}/s", "--executor-option", "step_us=2000") as (server, address):
        words = command("generate", "--connect", address, "--max-tokens", "500", "--json", "5")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, env=environment(), **pipes) as generate:  # type: ignore[call-overload]
            with LLM(connect=address) as llm:
                wait_for_running(llm, 1)
            server.send_signal(signal.SIGTERM)
            text, errors = generate.communicate(timeout=60)
        assert (generate.returncode, errors) == (0, "")
        summary = json.loads(text)
        assert [len(request["token_ids"]) for request in summary["requests"]] == [500]
        assert server.wait(20) == 0


def test_a_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    with serving(f"ipc://{tmp_path}/s", "--executor-option", f"max_model_len={4 * LONG}") as (server, address):
        llm = LLM(connect=address)
        errors: list[Exception] = []

        def generate() -> None:
            try:
                llm.generate([[5, 6]], SamplingParams(max_tokens=LONG, ignore_eos=True), use_tqdm=False)
            except EngineDeadError as error:
                errors.append(error)

        running = threading.Thread(target=generate)
        running.start()
        wait_for_running(llm, 1)
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None
        while "draining" not in server.stderr.readline():
            pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 143
        running.join(20)
        llm.close()
        assert "the engine was told to stop at once" in str(errors)


def test_the_death_of_the_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXEC, "1")  # its engine is to be its only child
    with serving(f"ipc://{tmp_path}/s", "--restarts", "0") as (server, _):
        (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        assert server.wait(20) == 1
        assert server.stderr is not None
        error = server.stderr.read()
        assert "was killed by SIGKILL" in error
        assert "Traceback" not in error


@pytest.mark.parametrize("moment", ["spawned", "phase"])
def test_a_signal_while_starting_ends_the_server(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXEC, "1")  # its engine is to be its only child
    server = subprocess.Popen(
        command("serve", "--executor", "fake", "--listen", f"ipc://{tmp_path}/s"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    if moment == "phase":
        select.select([server.stderr], [], [], 20)  # the engine has begun to start
    else:  # the child exists
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        while not children.read_text():
            time.sleep(0.001)
    server.send_signal(signal.SIGTERM)
    _, error = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "Traceback" not in error


def test_a_server_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its private address is made before its owner file is looked at."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (not_ours := tmp_path / "notes").write_text("Buy milk.")
    with pytest.raises(ConfigError, match="is not an owner file"):
        serve.main(["--executor", "fake", "--http", "127.0.0.1:0", "--owner-file", str(not_ours)])
    assert list(tmp_path.iterdir()) == [not_ours]
