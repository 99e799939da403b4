"""Models with an adapter and with a draft model, each loaded on request from tiny random files."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.adapters.peft_files import matrix_shapes, random_matrices, write_peft
from tests.core.models.checkpoints import build
from tests.core.models.idefics3_checkpoint import tiny_tokenizer
from tests.frontend.http.caller import Caller, serving

PROMPT = [5, 6, 7, 8] * 6
_MODELS = """
[models.tuned]
model = {model}
adapters = {{sql = {adapter}}}

[models.drafted]
model = {model}
speculative_config = {{model = {draft}, num_speculative_tokens = 3, draft_ns = 1, step_ns = [1000000, 1000001]}}

[models.untold]
model = {draft}

[models.wrong]
model = {model}
adapters = {{absent = "/no/such/adapter"}}
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("models")
    model = build("llama2")
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save(str(folder / "model" / "tokenizer.json"))
    model.save_pretrained(folder / "draft")  # the same, so its drafts are right
    write_peft(folder / "sql", random_matrices(matrix_shapes(model.config), 2, 1), rank=2, alpha=8)
    paths = {"model": folder / "model", "draft": folder / "draft", "adapter": folder / "sql"}
    table = folder / "models.toml"
    table.write_text(_MODELS.format(**{name: json.dumps(str(path)) for name, path in paths.items()}))
    options = ("--kv-cache-memory-bytes", "1M", "--dtype", "float32")
    with serving("--models", str(table), "--memory", "1200M", *options) as caller:
        yield caller


def tokens(many: Caller, model: str) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = many.post("/v1/completions", {**body, "return_token_ids": True})
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return answer.json["choices"][0]["token_ids"]


def test_an_adapter_is_listed_with_its_model_and_answers_by_its_name(many: Caller) -> None:
    listed = {one["id"]: one for one in many.get("/v1/models").json["data"]}
    assert (listed["sql"]["parent"], listed["tuned"]["parent"]) == ("tuned", None)
    assert listed["sql"]["state"] == "unloaded"
    sql = tokens(many, "sql")  # loads its model
    assert {one["id"]: one["state"] for one in many.get("/v1/models").json["data"]}["sql"] == "loaded"
    assert tokens(many, "tuned") != sql
    assert tokens(many, "sql") == sql
    assert many.get("/v1/models/sql").json["parent"] == "tuned"
    tags = {one["name"]: one["details"]["parent_model"] for one in many.get("/api/tags").json["models"]}
    assert (tags["sql:latest"], tags["tuned:latest"]) == ("tuned", "")


def test_a_draft_model_changes_no_token(many: Caller) -> None:
    assert tokens(many, "drafted") == tokens(many, "tuned")
    lines = many.get("/metrics?model=drafted").body.decode().splitlines()
    (accepted,) = [line.split()[-1] for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(accepted) > 0


def test_the_reason_of_a_failed_load_is_said(many: Caller) -> None:
    for name, reason in (("wrong", "/no/such/adapter"), ("untold", "has no tokenizer")):
        answer = many.post("/v1/completions", {"model": name, "prompt": [1, 2], "max_tokens": 1})
        assert answer.status == 503
        assert reason in answer.json["error"]["message"]
