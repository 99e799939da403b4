"""Prompts before texts to embed: those of published models, by name and by what a text is."""

from typing import Any

import pytest

from frontend.text.tokenizer import TextPrompts, read_text_prompts
from ipc.errors import InvalidRequestError, ModelFileError

_TASK = "Given a web search query, retrieve relevant passages that answer the query"
#: As in the models' config_sentence_transformers.json.
EMBEDDING_GEMMA = {  # of both versions
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "Clustering": "task: clustering | query: ",
    "Retrieval-query": "task: search result | query: ",
    "Retrieval-document": "title: none | text: ",
}
QWEN3 = {"query": f"Instruct: {_TASK}\nQuery:", "document": ""}
JINA = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
}
ARCTIC = {"query": "Represent this sentence for searching relevant passages: "}


@pytest.mark.parametrize(
    ("by_name", "query", "document"),
    [
        (EMBEDDING_GEMMA, "task: search result | query: What?", "title: none | text: What?"),
        (QWEN3, f"Instruct: {_TASK}\nQuery:What?", "What?"),
        (JINA, f"{JINA['retrieval.query']}What?", f"{JINA['retrieval.passage']}What?"),
        (ARCTIC, f"{ARCTIC['query']}What?", "What?"),
        ({}, "What?", "What?"),
    ],
)
def test_published_forms(by_name: dict[str, str], query: str, document: str) -> None:
    prompts = TextPrompts(by_name)
    for kind in ("query", "search_query"):
        assert prompts.before(["What?"], prompts.name_for(kind)) == [query]
    for kind in ("document", "passage", "search_document"):
        assert prompts.before(["What?"], prompts.name_for(kind)) == [document]


def test_a_default_is_not_put_before_documents() -> None:
    prompts = TextPrompts(ARCTIC, "query")
    assert prompts.before(["What?"], None) == [f"{ARCTIC['query']}What?"]
    assert prompts.before(["What?"], prompts.name_for("document")) == ["What?"]


def test_what_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="input_type must be query or document, got 'classification'"):
        TextPrompts(QWEN3).name_for("classification")
    with pytest.raises(InvalidRequestError, match="no prompt for queries: use prompt_name, it has 'Clustering'"):
        TextPrompts({"Clustering": "cluster: "}).name_for("query")


@pytest.mark.parametrize(
    ("values", "text"),
    [({"prompts": ["query"]}, "texts by name"), ({"prompts": QWEN3, "default_prompt_name": "a"}, "not one of its")],
)
def test_wrong_files(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        read_text_prompts(values, {})
