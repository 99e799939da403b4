"""Pooling from the caller's side: sync and async, errors, and an engine that dies in between."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.executors.fake import checksum, fake_vector
from engine_core import LLM, AsyncLLM, InvalidRequestError, PoolingParams, RequestFailedError
from frontend.pooling import pair_prompt
from frontend.results.pooling_outputs import PoolingOutput, PoolingRequestOutput, cosine_score
from frontend.text.chat_template import render_chat
from frontend.text.tokenizer import Tokenizer
from ipc.files.model_files import read_tokenizer_files, resolve_model
from ipc.tables.arrays import Floats
from ipc.wire.messages import PauseMode
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write
from tests.core.models.byte_tokenizer import byte_tokenizer
from tests.fake_options import fake_options
from tools.cli import main

FAKE: dict[str, Any] = {
    "executor": "fake",
    "executor_options": fake_options(vocab_size=1000),
    "max_model_len": 64,
    "max_num_seqs": 4,
}
PROMPTS = [[number, 7, 8] for number in range(20)]


def expected(ids: list[int]) -> Floats:
    return fake_vector(checksum(np.array(ids)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**FAKE) as engine:
        yield engine


def test_a_cosine_is_at_most_1() -> None:
    """Sums of float64 make it 1.0000000000000002 for this vector."""
    one = PoolingRequestOutput("a", PoolingOutput(np.array([1, 2, 1], np.float32)), [1])
    other = PoolingRequestOutput("b", PoolingOutput(np.array([-1, -2, -1], np.float32)), [1])
    assert cosine_score(one, one).outputs.score == 1.0
    assert cosine_score(one, other).outputs.score == -1.0


def test_embed_encode_and_score(llm: LLM) -> None:
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.outputs.embedding for output in outputs] == [expected(ids).tolist() for ids in PROMPTS]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    (each,) = llm.encode([[5, 6, 7]], PoolingParams(task="token_embed"), use_tqdm=False)
    assert np.array_equal(each.outputs.data, [expected([5]), expected([5, 6]), expected([5, 6, 7])])
    several = [PoolingParams(dimensions=count) for count in (2, 3)]
    found = llm.encode([[5], [6]], several, use_tqdm=False)
    assert [output.outputs.data.shape for output in found] == [(2,), (3,)]
    (cut,) = llm.embed([list(range(100))], use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert cut.prompt_token_ids == list(range(36, 100))  # a prompt may fill the context


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda llm: llm.classify([[3]]), "'classify'.*it does embed, token_embed"),
        (lambda llm: llm.embed([[3]], pooling_params=PoolingParams(dimensions=9)), "from 1 to 8"),
        (lambda llm: llm.embed([[3]], pooling_params=PoolingParams(task="classify")), "the parameters ask for"),
        (lambda llm: llm.embed([list(range(65))]), "at most 64 fit"),
        (lambda llm: llm.encode([[3], [4]], [PoolingParams()]), "2 prompts need one pooling_params each"),
        (lambda llm: llm.encode([[3]], "embed"), "1 prompt needs one pooling_params each|must be PoolingParams"),
        (lambda llm: llm.embed_chats([[{"role": "user", "content": "a"}], 5]), "this engine has no tokenizer"),
        (lambda llm: llm.score("a", 3), "a str or a list of str"),
        (lambda llm: PoolingParams(task="rank"), "task must be one of"),
        (lambda llm: PoolingParams(dimensions=0), "at least 1"),
        (lambda llm: PoolingParams(use_activation=1), "True, False or None"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, call: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        call(llm)


def test_async_and_abort() -> None:
    async def run() -> None:
        async with AsyncLLM(**FAKE) as llm:
            found = [output async for output in llm.encode([5, 6], PoolingParams(dimensions=3))]
            assert [output.outputs.data.tolist() for output in found] == [expected([5, 6])[:3].tolist()]
            llm.client.pause(PauseMode.ALL)
            waiting = asyncio.ensure_future(anext(llm.encode([5], request_id="mine")))
            await asyncio.sleep(0.05)
            await llm.abort("mine")
            with pytest.raises(RequestFailedError, match="aborted"):
                await waiting

    asyncio.run(run())


def test_requests_of_an_engine_that_dies_are_answered_by_the_next() -> None:
    with LLM(**FAKE) as llm:
        llm.client.pause(PauseMode.ALL)  # nothing is answered by this engine
        params = PoolingParams(task="embed")
        numbers = [llm.client.submit(ids, params, seed=0) for ids in PROMPTS]
        os.kill(llm.client.welcome.pid, signal.SIGKILL)
        left = np.array(numbers)
        while len(left):
            left = np.setdiff1d(left, llm.client.wait(left, timeout=30))
        assert [llm.client.read(number).vectors is not None for number in numbers] == [True] * len(numbers)
        for number, ids in zip(numbers, PROMPTS, strict=True):
            vectors = llm.client.read(number).vectors
            assert vectors is not None
            assert np.array_equal(vectors[0], expected(ids))
        assert llm.client.welcome.epoch > 0


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Two texts with the demo model's tokenizer and a fake engine."""
    assert (
        main(["embed", "One.", "Two.", "--executor", "fake", "-m", _demo(), "--executor-option", "vocab_size=49152"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith('{"text":"') and line.count(",") == 9 for line in lines] == [True, True]


def _demo() -> str:
    from ipc.files.model_files import resolve_model

    return str(resolve_model(None))


# --- rerankers -------------------------------------------------------------------------------------------------------

RERANKER = Path(__file__).parents[2] / "examples" / "qwen3_reranker.jinja"
QUERY, DOCUMENT = "What is a panda?", "A bear that eats bamboo."
#: The prompt of Qwen3-Reranker's model card, put together here by hand.
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}'
    f"\n<Query>: {QUERY}\n<Document>: {DOCUMENT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@pytest.mark.checkout
def test_a_reranker_reads_what_its_template_makes_of_a_pair(tmp_path: Path) -> None:
    """A language model of bytes as a reranker."""
    write(tmp_path, LLAMA, random_weights(model_shapes(LLAMA), 1))
    byte_tokenizer(["<|im_start|>", "<|im_end|>"]).save(str(tmp_path / "tokenizer.json"))
    options: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "classifier_from_token": "n,y"}
    usual, other = "Given a web search query, retrieve relevant passages that answer the query", "Find animals."
    with LLM(chat_template=str(RERANKER), **options) as llm:
        tokenizer, scores = llm.get_tokenizer(), []
        for given, said in ((None, usual), ("", usual), (other, other)):
            ids = tokenizer.encode(CARD.format(instruction=said), add_special_tokens=False)
            (output,) = llm.score(QUERY, DOCUMENT, use_tqdm=False, instruction=given)
            assert output.prompt_token_ids == ids
            assert output.outputs.score == llm.classify([ids], use_tqdm=False)[0].outputs.probs[0]
            scores.append(output.outputs.score)
        assert scores[0] == scores[1] != scores[2]
        (plain,) = llm.score(QUERY, DOCUMENT, use_tqdm=False, template="{query} {document}")
        assert plain.prompt_token_ids == tokenizer.encode(f"{QUERY} {DOCUMENT}")
        with pytest.raises(InvalidRequestError, match="instruction must be a str, got int"):
            llm.score(QUERY, DOCUMENT, use_tqdm=False, instruction=3)  # type: ignore[arg-type]


VL_RERANKER = RERANKER.with_name("qwen3_vl_reranker.jinja")
#: Qwen3-VL-Reranker's, which has other spaces and lines.
VL_CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}'
    f"<Query>:{QUERY}\n<Document>:{DOCUMENT}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.checkout
@pytest.mark.parametrize("name", ["default", "reranker", "pairs"])
def test_a_template_for_pairs_is_chosen_by_what_it_reads(name: str) -> None:
    """Next to a template of chats, and one that is none. The files of Qwen3-VL-Reranker have it under a name."""
    tokenizer = Tokenizer.from_files(read_tokenizer_files(resolve_model(None)))
    assert tokenizer.chat_template is not None
    tokenizer.chat_templates |= {"broken": "{% for", name: VL_RERANKER.read_text()}
    handle: Any = SimpleNamespace(tokenizer=tokenizer)
    usual = "Given a search query, retrieve relevant candidates that answer the query."
    for given, said in ((None, usual), ("", usual), ("Find animals.", "Find animals.")):
        prompt: Any = pair_prompt(handle, (QUERY, DOCUMENT), None, given)
        expected = tokenizer.encode(VL_CARD.format(instruction=said), add_special_tokens=False)
        assert prompt == {"prompt_token_ids": expected}
    tokenizer.chat_templates["others"] = "{{ 'query' }}" + VL_RERANKER.read_text()
    if name == "pairs":
        with pytest.raises(InvalidRequestError, match=r"several chat templates read pairs \(pairs, others\)"):
            pair_prompt(handle, (QUERY, DOCUMENT), None)
    else:
        assert pair_prompt(handle, (QUERY, DOCUMENT), None, said) == prompt


@pytest.mark.checkout
def test_images_of_pairs_are_where_the_models_are() -> None:
    """Of the template that is an example: parts one after the other, and without a prompt for the answer if asked."""
    messages = [
        {"role": "query", "content": [{"type": "image"}, {"type": "text", "text": "A cat"}]},
        {"role": "document", "content": [{"type": "text", "text": "here: "}, {"type": "image"}]},
    ]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = render_chat(VL_RERANKER.read_text(), messages, image_mark=mark, add_generation_prompt=False)
    assert text.endswith(f"<Query>:{mark}A cat\n<Document>:here: {mark}<|im_end|>\n")


def test_an_instruction_that_nothing_reads_is_refused(llm: LLM) -> None:
    handle: Any = SimpleNamespace(tokenizer=Tokenizer.from_files(read_tokenizer_files(resolve_model(None))))
    with pytest.raises(InvalidRequestError, match='a chat template that names the roles "query" and "document"'):
        pair_prompt(handle, (QUERY, DOCUMENT), None, "Find animals.")
    with pytest.raises(InvalidRequestError, match="for rerankers only: call embed_chats"):
        llm.score("a", [{"content": [{"type": "text", "text": "b"}]}], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="put it before the texts that are embedded"):
        llm.score(QUERY, DOCUMENT, use_tqdm=False, instruction="Find animals.")
