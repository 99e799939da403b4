"""Structured outputs from LLM to an engine process and back, on the demo model's vocabulary."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest

from frontend.llm import LLM
from ipc.errors import InvalidRequestError
from ipc.files.model_files import resolve_model
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from tests.fake_options import fake_options
from tests.tools.test_cli import run

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DEMO = str(resolve_model(None))
CLI = ("--model", DEMO, "--executor", "fake", "--executor-option", "vocab_size=49152")


@pytest.fixture(scope="module")
def fake() -> Iterator[LLM]:
    """The fake executor with the demo model's tokenizer."""
    with LLM(DEMO, executor="fake", executor_options=fake_options(vocab_size=49_152), max_num_seqs=8) as llm:
        yield llm


def constrained(
    max_tokens: int = 100, temperature: float = 1.0, seed: int | None = None, **fields: object
) -> SamplingParams:
    given = StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, structured_outputs=given)


def test_kinds_and_neighbours_in_one_batch(fake: LLM) -> None:
    params = [
        constrained(json=SCHEMA),
        constrained(regex="[a-c]{5}"),
        constrained(choice=["yes", "no"]),
        SamplingParams(),
    ]
    texts = [output.outputs[0] for output in fake.generate(["x"] * 4, params, use_tqdm=False)]
    jsonschema.validate(json.loads(texts[0].text), SCHEMA)
    assert set(texts[1].text) <= set("abc")
    assert len(texts[1].text) == 5
    assert texts[2].text in ("yes", "no")
    assert [text.finish_reason for text in texts[:3]] == ["stop"] * 3
    alone = fake.generate(["x"], SamplingParams(seed=0), use_tqdm=False)[0].outputs[0].token_ids
    again = fake.generate(["x"] * 2, [constrained(json=SCHEMA), SamplingParams(seed=0)], use_tqdm=False)
    assert again[1].outputs[0].token_ids == alone


def test_a_bad_grammar_is_an_error_of_its_request(fake: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt 0 of 1: the grammar .*\(regex\) cannot be used"):
        fake.generate("x", constrained(regex="("), use_tqdm=False)
    assert fake.generate("x", constrained(choice=["a"]), use_tqdm=False)[0].outputs[0].text == "a"


def test_an_engine_without_a_tokenizer_refuses_them() -> None:
    with (
        LLM(executor="fake") as llm,
        pytest.raises(InvalidRequestError, match="need the model's tokenizer: the model has no tokenizer"),
    ):
        llm.generate([1, 2], constrained(choice=["a"], max_tokens=3), use_tqdm=False)


def test_the_demo_model() -> None:
    """Greedy and drawn, with options beside it; two runs give the same."""
    prompts = ["Alice is 30 years old. As JSON: ", "Is the sky blue? Answer: ", "An identifier: "]
    params = [
        constrained(json=SCHEMA, temperature=0.0, disable_any_whitespace=True),
        constrained(choice=["yes", "no"], seed=3),
        constrained(regex="[A-Z]{2}-[0-9]{3}", seed=4),
    ]
    with LLM(max_model_len=256, max_num_seqs=4) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        second = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
        with pytest.raises(InvalidRequestError, match="allow no token here that the request's other parameters"):
            llm.generate("x", msgspec.structs.replace(params[1], min_tokens=5), use_tqdm=False)
    texts = [output.outputs[0].text for output in first]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert [output.outputs[0].token_ids for output in second] == [output.outputs[0].token_ids for output in first]
    assert texts[1] in ("yes", "no")


def test_flags_of_generate(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    options = (*CLI, "--json", "--temperature", "1")
    done = run("generate", *options, "--json-schema", f"@{schema}", "--disable-any-whitespace", "A person")
    jsonschema.validate(json.loads(json.loads(done.stdout)["requests"][0]["text"]), SCHEMA)
    done = run("generate", *options, "--choice", "ja", "--choice", "nein", "A or B")
    assert json.loads(done.stdout)["requests"][0]["text"] in ("ja", "nein")
    form = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[a-c]{3}"}, "end": ">"}
    done = run("generate", *options, "--structural-tag", json.dumps({"format": form}), "A tag")
    assert re.fullmatch("<[a-c]{3}>", json.loads(done.stdout)["requests"][0]["text"])
    done = run("generate", *options, "--json-schema", "@/nowhere.json", "A")
    assert "nowhere.json" in done.stderr


def test_a_capture_is_replayed_with_its_grammars(tmp_path: Path) -> None:
    """A replay has no preparation: the grammars are compiled when their rows are added."""
    capture = str(tmp_path / "run.cap")
    options = (*CLI, "--temperature", "1")
    done = run("generate", *options, "--capture", capture, "--json-schema", json.dumps(SCHEMA), "A", "B")
    assert done.returncode == 0, done.stderr
    for mode in ("resched", "full"):
        done = run("replay", capture, "--mode", mode)
        assert done.returncode == 0, done.stdout + done.stderr
