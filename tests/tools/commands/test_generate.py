"""`engine-core generate`, run as users run it: the answers, where they are printed, and what is printed beside them."""

import contextlib
import json
import os
import pty
import subprocess
from pathlib import Path

from tests.core.adapters.peft_files import random_matrices, write_peft
from tests.fake_tokens import fake_tokens
from tests.tools.test_cli import VOCAB, command, environment, run


def test_generate_gives_each_prompt_its_own_tokens() -> None:
    done = run("generate", "--executor", "fake", "--max-tokens", "6", "--json", "5 6 7", "-", stdin="8 9\n")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [request["token_ids"] for request in report["requests"]] == [
        fake_tokens([5, 6, 7], 6, VOCAB),
        fake_tokens([8, 9], 6, VOCAB),
    ]
    assert report["engine"]["num_output_tokens"] == 12
    assert report["engine"]["max_batch_size"] in (1, 2), "the second may come after the first has finished"
    assert report["engine"]["start_s"] > 0


def test_without_a_terminal_answers_are_printed_once_and_tables_beside_them() -> None:
    done = run("generate", "--executor", "fake", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert [line[:6] for line in done.stdout.splitlines()[::3]] == ["=== 1 ", "=== 2 ", "=== 3 ", "=== 4 "]
    for word in ("TTFT ms", "TPOT ms", "cached", "steps", "batch size", "prefix cache hits", "KV blocks", "preempt"):
        assert word in done.stderr
        assert word not in done.stdout
    assert "73.8%" in done.stderr, "three of four demo prompts share four blocks: 192 of 260 tokens"
    assert "\x1b" not in done.stdout + done.stderr
    assert "kv cache" not in done.stderr, "the phases of the start are for terminals"


def test_quiet_is_the_answers_alone() -> None:
    words = ("generate", "--executor", "fake", "--max-tokens", "4", "--ignore-eos", "--quiet")
    one = run(*words, stdin="5 6 7\n")  # a prompt in a pipe needs no "-"
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == " ".join(map(str, fake_tokens([5, 6, 7], 4, VOCAB))) + "\n"
    two = run(*words, "5 6 7", "900000")
    assert two.stdout.startswith(f"=== 1 5 6 7 (4 tokens, length)\n{one.stdout}\n=== 2 900000 (failed)\n")
    assert "error: " in two.stderr
    assert two.returncode == 1
    assert run(*words, stdin="").stdout.count("===") == 4, "nothing in the pipe: the demo"


def test_on_a_terminal_the_answers_grow_in_place() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("generate", "--executor", "fake", "--max-tokens", "2000"),
        env=environment(),
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side has closed
        while data := os.read(ours, 65_536):
            shown += data
    os.close(ours)
    assert process.wait(20) == 0
    text = shown.decode()
    assert "\x1b[?25l" in text, "the cursor is hidden while panels are redrawn"
    assert text.count("╭") > 2 * 4, "four panels were drawn more than once"
    assert "2000 tokens, length" in text


def test_a_failed_request_fails_alone() -> None:
    done = run("generate", "--executor", "fake", "--executor-option", "vocab_size=100", "--json", "5 6", "500")
    assert done.returncode == 1
    good, bad = json.loads(done.stdout)["requests"]
    assert good["token_ids"] == fake_tokens([5, 6], 128, 100)[: len(good["token_ids"])]
    assert good["error"] == ""
    assert "token id 500" in bad["error"]


def test_each_prompt_may_have_several_answers() -> None:
    flags = ["--executor", "fake", "--executor-option", "vocab_size=100"]
    flags += ["--n", "2", "--temperature", "1", "--max-tokens", "3", "--ignore-eos"]
    done = run("generate", *flags, "--json", "5 6", "500", "7 8")
    assert done.returncode == 1
    found = json.loads(done.stdout)["requests"]
    assert [(one["prompt"], one["choice"]) for one in found] == [(p, c) for p in ("5 6", "500", "7 8") for c in (0, 1)]
    assert [len(one["token_ids"]) for one in found] == [3, 3, 0, 0, 3, 3]
    done = run("generate", *flags, "--quiet", "5 6", "500")
    headings = [line for line in done.stdout.splitlines() if line.startswith("===")]
    assert [line.partition(" (")[0] for line in headings] == [
        *("=== 1 5 6 [1/2]", "=== 2 5 6 [2/2]", "=== 3 500 [1/2]", "=== 4 500 [2/2]")
    ]
    assert done.stderr.count("token id 500") == 1


def test_an_adapter_by_its_name(tmp_path: Path) -> None:
    write_peft(tmp_path / "sql", random_matrices({"model.layers.0.self_attn.q_proj": (16, 16)}, 2, 1), rank=2, alpha=4)
    words = ("generate", "--executor", "fake", "--max-tokens", "4", "--ignore-eos", "--quiet")
    adapters = ("--enable-lora", "--lora-modules", f"sql={tmp_path / 'sql'}")
    base, sql = (run(*words, "5 6 7", *adapters, *lora).stdout for lora in ((), ("--lora", "sql")))
    assert len(base.split()) == len(sql.split()) == 4
    assert base != sql
    other = run(*words, "5 6 7", *adapters, "--lora", "sq")
    assert other.returncode == 1
    assert "'sq'" in other.stderr
