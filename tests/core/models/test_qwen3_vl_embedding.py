"""Qwen3-VL-Embedding and -Reranker: vectors and scores of texts and images are those of transformers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine_core import (
    LLM,
    AsyncLLM,
    InvalidRequestError,
    ModelFileError,
    PoolingParams,
    RequestFailedError,
    UnsupportedParameterError,
)
from ipc.wire.messages import PauseMode
from tests.core.models.grid_checkpoints import tiny_model
from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.qwen3_vl_embedding_checkpoint import (
    FAMILY,
    MARK,
    PROMPTS,
    USUAL,
    prompt_of,
    their_state,
    their_vector,
    write_checkpoint,
)
from tests.core.models.test_pooling_models import unit

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(40, 60, 1), noise(33, 25, 2), noise(64, 20, 3), noise(9, 50, 4), noise(7, 7, 5)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_model_len": 700, "threads": 1}
USUAL_OF_PAIRS = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
#: The content of the user's message: texts and images in order.
CASES: list[list[Any]] = [
    ["A woman playing with her dog on a beach at sunset."],
    [IMAGES[0]],
    [IMAGES[1], "A cat"],
    [IMAGES[3], IMAGES[4], IMAGES[2], "What is it?"],
    ["first ", IMAGES[2], " and ", IMAGES[0], IMAGES[1], ", then ", IMAGES[3], " at the end"],
    [IMAGES[0], IMAGES[0], "the same twice"],
]


@pytest.fixture(scope="module", params=["plain", "modules", "saved"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_checkpoint(tmp_path_factory.mktemp(form), form=form)
    with LLM(str(folder), **OPTIONS, runner="pooling" if form == "plain" else "auto") as llm:
        yield llm


def chat_of(content: list[Any], instruction: str | None = None) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one} for one in content
    ]
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    return [*system, {"role": "user", "content": parts}]


def side_of(content: list[Any]) -> Any:
    """One side of a pair: a text as such, others as the parts of a message."""
    return (
        content[0] if content[1:] == [] and isinstance(content[0], str) else {"content": chat_of(content)[0]["content"]}
    )


def images_of(content: list[Any]) -> list[Any]:
    return [one for one in content if not isinstance(one, str)]


def check(output: Any, ids: list[int], vector: Any) -> None:
    assert output.prompt_token_ids == ids
    np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-5)


def test_vectors_of_chats(llm: LLM) -> None:
    """Alone and together: the same bits."""
    for instruction in (USUAL, "Find images."):
        chats = [chat_of(content, instruction) for content in CASES]
        options: dict[str, Any] = {"add_generation_prompt": True, "prompt_name": ""}
        together = llm.embed_chats(chats, use_tqdm=False, **options)
        for content, chat, one in zip(CASES, chats, together, strict=True):
            check(one, *their_vector(content, instruction))
            (alone,) = llm.embed_chats(chat, use_tqdm=False, **options)
            assert alone.vectors.tobytes() == one.vectors.tobytes()
        assert len({one.vectors.tobytes() for one in together}) == len(CASES)


def test_vectors_of_prompts_as_the_models_script_writes_them(llm: LLM) -> None:
    for content in CASES:
        text = prompt_of("".join(one if isinstance(one, str) else MARK for one in content))
        prompt = {"prompt": text, "multi_modal_data": {"image": images_of(content)}}
        (output,) = llm.embed(prompt, use_tqdm=False, prompt_name="")  # type: ignore[arg-type]
        check(output, *their_vector(content))
        short = PoolingParams(dimensions=16)
        (output,) = llm.embed(prompt, use_tqdm=False, pooling_params=short, prompt_name="")  # type: ignore[arg-type]
        state = their_state(output.prompt_token_ids, images_of(content))
        np.testing.assert_allclose(output.outputs.embedding, unit(state[:16]), atol=1e-5)


def test_the_files_say_how_chats_are_written(llm: LLM, form: str) -> None:
    """sentence-transformers' files name the system message, and that the answer is begun."""
    says = form != "plain"
    (usual,) = llm.embed_chats(chat_of(CASES[2]), use_tqdm=False)
    check(usual, *their_vector(CASES[2], USUAL if says else None, opens_answer=says))
    (other,) = llm.embed_chats(chat_of(CASES[2]), use_tqdm=False, prompt_name="", add_generation_prompt=not says)
    check(other, *their_vector(CASES[2], None, opens_answer=not says))
    (own,) = llm.embed_chats(chat_of(CASES[2], "Find images."), use_tqdm=False)
    check(own, *their_vector(CASES[2], "Find images.", opens_answer=says))
    if says:
        (query,) = llm.embed_chats(chat_of(CASES[0]), use_tqdm=False, prompt_name="query")
        check(query, *their_vector(CASES[0], PROMPTS["query"]))
    with pytest.raises(InvalidRequestError, match="prompt_name='document' is not a prompt of this model"):
        llm.embed_chats(chat_of(CASES[0]), use_tqdm=False, prompt_name="document")


def test_chats_of_an_event_loop(tmp_path: Path) -> None:
    """The vectors of AsyncLLM.embed_chats() are LLM's: together, with its arguments, and after an abort."""
    options: dict[str, Any] = {"add_generation_prompt": True, "prompt_name": ""}
    short = PoolingParams(dimensions=16)

    async def run() -> None:
        async with AsyncLLM(str(write_checkpoint(tmp_path)), **OPTIONS, runner="pooling") as llm:

            async def vector(content: list[Any], *given: Any) -> Any:
                (output,) = [one async for one in llm.embed_chats(chat_of(content, USUAL), *given, **options)]
                return output

            outputs = await asyncio.gather(*map(vector, CASES))
            for content, output in zip(CASES, outputs, strict=True):
                check(output, *their_vector(content))
            cut = await vector(CASES[0], short)
            np.testing.assert_allclose(
                cut.outputs.embedding, unit(np.array(outputs[0].outputs.embedding[:16])), atol=1e-5
            )
            chats: list[Any] = ["a text", [], [chat_of(CASES[0])], 5]
            for wrong in chats:
                with pytest.raises(InvalidRequestError, match=r"messages.* must be a (list|dict)"):
                    await anext(llm.embed_chats(wrong))
            llm.client.pause(PauseMode.ALL)
            waiting = asyncio.ensure_future(anext(llm.embed_chats(chat_of(CASES[1]), request_id="mine")))
            while not (await llm.statistics()).num_waiting:
                await asyncio.sleep(0.001)
            await llm.abort("mine")
            with pytest.raises(RequestFailedError, match="aborted"):
                await waiting

    asyncio.run(run())


def test_a_token_at_the_end_of_texts(tmp_path: Path) -> None:
    """The template does not write what the tokenizer's post-processor adds."""
    end = "<|im_end|>"
    with LLM(str(write_checkpoint(tmp_path, end=end)), **OPTIONS) as llm:
        for content in CASES[:3]:
            (output,) = llm.embed_chats(chat_of(content), use_tqdm=False)
            check(output, *their_vector(content, end=end))
            assert output.prompt_token_ids[-1] == llm.get_tokenizer().convert_tokens_to_ids(end)


def test_what_is_refused(llm: LLM) -> None:
    for parts, text in (
        ([noise(2, 500, 1)], "one side may be at most 200 times the other"),
        ([b"GIF"], "cannot be read"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            llm.embed_chats(chat_of(parts), use_tqdm=False)
    chats: list[Any] = [[[]], [chat_of(CASES[0]), 5], [chat_of(CASES[0]), "a text"]]
    for wrong in chats:
        with pytest.raises(InvalidRequestError, match="messages must be a list of"):
            llm.embed_chats(wrong, use_tqdm=False)
    with pytest.raises(UnsupportedParameterError, match="truncate_prompt_tokens cannot be used"):
        llm.embed_chats(chat_of(CASES[1]), False, PoolingParams(truncate_prompt_tokens=5))


@pytest.mark.parametrize("tied", [False, True])
def test_scores_of_a_reranker(tied: bool, tmp_path: Path) -> None:
    """The probability of the second of two tokens, after a query and a document that may be images."""
    write_checkpoint(tmp_path, form="plain")
    head = tiny_model(FAMILY).lm_head.weight
    if tied:
        config = json.loads((tmp_path / "config.json").read_text())
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
        (tmp_path / "config.json").write_text(json.dumps(config))
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(
            {name: one for name, one in tensors.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
        )
        head = tensors["model.language_model.embed_tokens.weight"]
    with LLM(str(tmp_path), **OPTIONS, classifier_from_token="n,y") as llm:
        no, yes = (llm.get_tokenizer().convert_tokens_to_ids(name) for name in "ny")
        weight = (head[yes] - head[no]).detach().numpy()
        for content in CASES:
            text = "".join(one if isinstance(one, str) else MARK for one in content)
            prompt = prompt_of(f"<Instruct>: Find.<Query>:a dog\n<Document>:{text}", "Judge whether it fits.")
            given = {"prompt": prompt, "multi_modal_data": {"image": images_of(content)}}
            (output,) = llm.classify(given, use_tqdm=False)  # type: ignore[arg-type]
            logit = float(their_state(output.prompt_token_ids, images_of(content)) @ weight)
            np.testing.assert_allclose(output.outputs.probs, [1 / (1 + np.exp(-logit))], atol=1e-5)


@pytest.mark.checkout
def test_scores_of_pairs_with_images(tmp_path: Path) -> None:
    """By the template for pairs that the model's files have under a name. Texts and images, on either side."""
    write_checkpoint(tmp_path, form="plain")
    (tmp_path / "additional_chat_templates").mkdir()
    template = Path(__file__).parents[3] / "examples" / "qwen3_vl_reranker.jinja"
    (tmp_path / "additional_chat_templates" / "reranker.jinja").write_text(template.read_text())
    head = tiny_model(FAMILY).lm_head.weight
    queries: list[list[Any]] = [["a dog"], [IMAGES[2], "this"]]
    with LLM(str(tmp_path), **OPTIONS, classifier_from_token="n,y") as llm:
        no, yes = (llm.get_tokenizer().convert_tokens_to_ids(name) for name in "ny")
        weight = (head[yes] - head[no]).detach().numpy()
        for query, instruction in zip(queries, ("Find.", USUAL_OF_PAIRS), strict=True):
            sides = [side_of(content) for content in (query, *CASES)]
            given = None if instruction == USUAL_OF_PAIRS else instruction
            outputs = llm.score(sides[0], sides[1:], use_tqdm=False, instruction=given)
            for content, output in zip(CASES, outputs, strict=True):
                one, other = ("".join(MARK if not isinstance(x, str) else x for x in y) for y in (query, content))
                text = f"<Instruct>: {instruction}<Query>:{one}\n<Document>:{other}"
                images = images_of([*query, *content])
                prompt = {"prompt": prompt_of(text, JUDGE), "multi_modal_data": {"image": images}}
                (same,) = llm.classify(prompt if images else prompt["prompt"], use_tqdm=False)  # type: ignore[arg-type]
                assert output.prompt_token_ids == same.prompt_token_ids
                logit = float(their_state(output.prompt_token_ids, images) @ weight)
                np.testing.assert_allclose(output.outputs.score, 1 / (1 + np.exp(-logit)), atol=1e-5)
        wrong: Any
        for wrong, why in (({"text": "a"}, "score.. takes a str"), (side_of([b"GIF"]), "cannot be read")):
            with pytest.raises(InvalidRequestError, match=why):
                llm.score("a dog", wrong, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="needs a chat template that names the roles"):
            llm.score("a dog", side_of(CASES[1]), use_tqdm=False, template="{query} {document}")


def test_a_wrong_argument_of_the_chat_template(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    wrong = {"processing_kwargs": {"chat_template": {"add_generation_prompt": "yes"}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ModelFileError, match="add_generation_prompt of chat_template must be a boolean; got 'yes'"):
        LLM(str(tmp_path), **OPTIONS)
