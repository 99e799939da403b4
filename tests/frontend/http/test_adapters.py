"""Adapters over HTTP: models of their own, listed with their parent, loaded and unloaded by the owner alone."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.http.callers.keys import digest_of
from ipc.files.model_files import resolve_model
from tests.core.adapters.peft_files import random_matrices, write_peft
from tests.frontend.http.caller import Caller, environment, serving
from tests.frontend.http.conftest import FAKE

SHAPES = {"model.layers.0.self_attn.q_proj": (16, 16)}  # of the fake executor


class Adapted:
    """A server with two adapters on disk, one of them loaded at its start."""

    def __init__(self, caller: Caller, folder: Path) -> None:
        self.caller, self.folder = caller, folder

    def control(self, *words: str) -> "subprocess.CompletedProcess[str]":
        where = ("--connect", self.caller.connect, "--owner-file", str(self.folder / "owner"))
        command = [sys.executable, "-m", "engine_core", "control", "lora", *words, *where]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)

    def tokens(self, model: str) -> Any:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True, "temperature": 0}
        body |= {"ignore_eos": True}
        answer = self.caller.post("/v1/completions", body)
        return answer.json["choices"][0]["token_ids"] if answer.status == 200 else answer

    @property
    def models(self) -> dict[str, str | None]:
        return {one["id"]: one["parent"] for one in self.caller.get("/v1/models").json["data"]}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "late"), 1):
        write_peft(folder / name, random_matrices(SHAPES, 2, seed), rank=2, alpha=4)
    options = ("-m", str(resolve_model(None)), "--served-model-name", "demo", "--owner-file", str(folder / "owner"))
    with serving(*FAKE, *options, "--enable-lora", "--lora-modules", f"sql={folder / 'sql'}") as caller:
        yield Adapted(caller, folder)


def test_an_adapter_is_a_model_of_its_own(adapted: Adapted) -> None:
    assert adapted.models == {"demo": None, "sql": "demo"}
    assert adapted.caller.get("/v1/models/sql").json["parent"] == "demo"
    base, sql = adapted.tokens("demo"), adapted.tokens("sql")
    assert len(base) == len(sql) == 6
    assert base != sql
    assert adapted.tokens("demo") == base
    chat = {"model": "sql", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert adapted.caller.post("/v1/chat/completions", chat).json["model"] == "sql"
    vectors = [adapted.caller.post("/v1/embeddings", {"model": m, "input": "a"}).json["data"] for m in ("demo", "sql")]
    assert vectors[0] != vectors[1]
    body = {"model": "demo", "input": "a", "task": "sql"}
    answer = adapted.caller.post("/v1/embeddings", body).json
    assert (answer["model"], answer["data"]) == ("demo", vectors[1])
    other = adapted.caller.post("/v1/embeddings", {**body, "task": "separation"})
    assert (other.status, other.json["error"]["param"]) == (404, "task")
    assert other.json["error"]["message"].endswith("is not the name of an adapter that is served here; served: sql")


def test_a_task_never_takes_the_adapter_that_model_names_away(adapted: Adapted) -> None:
    def ask(model: str, task: str) -> Any:
        return adapted.caller.post("/v1/embeddings", {"model": model, "input": "a", "task": task})

    assert ask("sql", "sql").json["data"] == ask("demo", "sql").json["data"]
    for model in ("demo", "sql"):
        for task, status, text in (("demo", 404, "served: sql"), ("", 400, "the name of an adapter: sql")):
            answer = ask(model, task)
            assert (answer.status, answer.json["error"]["param"]) == (status, "task")
            assert answer.json["error"]["message"].endswith(text)
    assert adapted.control("load", f"other={adapted.folder / 'late'}").returncode == 0
    assert ask("demo", "other").status == 200
    answer = ask("sql", "other")
    assert (answer.status, answer.json["error"]["param"]) == (400, "task")
    assert "model names the adapter 'sql', and task another one" in answer.json["error"]["message"]
    assert adapted.control("unload", "other").returncode == 0


def test_a_task_that_the_key_may_not_use(adapted: Adapted, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a {digest_of('base')} models=demo\nb {digest_of('both')} models=demo,sql\n")
    options = ("-m", str(resolve_model(None)), "--served-model-name", "demo", "--api-key-file", str(keys))
    with serving(*FAKE, *options, "--enable-lora", "--lora-modules", f"sql={adapted.folder / 'sql'}") as caller:
        for secret, status in (("base", 403), ("both", 200)):
            body = {"input": "a", "task": "sql"}
            answer = caller.post("/v1/embeddings", body, {"authorization": f"Bearer {secret}"})
            assert answer.status == status
            if status == 403:
                error = answer.json["error"]
                assert (error["param"], error["message"]) == ("task", "the key may not use this task; it may use: none")


def test_the_owner_loads_and_unloads_while_the_engine_runs(adapted: Adapted) -> None:
    assert adapted.tokens("late").status == 404
    loaded = adapted.control("load", f"late={adapted.folder / 'late'}")
    assert loaded.stdout.startswith("late  rank 2  "), loaded.stderr
    late = adapted.tokens("late")  # an unknown name is looked up at once
    assert len(late) == 6
    assert late not in (adapted.tokens("demo"), adapted.tokens("sql"))
    listed = adapted.control("list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["late", "sql"]
    assert adapted.control("unload", "late").returncode == 0
    end = time.monotonic() + 20
    while "late" in adapted.models:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert adapted.tokens("late").status == 404
    refused = adapted.control("unload", "late")
    assert (refused.returncode, "no adapter has the name 'late'" in refused.stderr) == (1, True), refused
    assert "adapter_config.json" in adapted.control("load", f"x={adapted.folder}").stderr
    assert "lora needs load NAME=PATH" in adapted.control("load").stderr


def test_nothing_administrative_goes_over_http(adapted: Adapted) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = adapted.caller.post(path, {"lora_name": "x", "lora_path": "/"})
        assert answer.status == 404, answer
