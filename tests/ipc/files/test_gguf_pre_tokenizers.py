"""Words of pre-tokenizers: those of transformers' tokenizers, where it has them, and those written out here."""

from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from ipc.files.gguf_vocabulary import PRE_TOKENIZERS
from tests.frontend.text.test_tokenizer import CORPUS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: Those of transformers' table, which it reads GGUF files with.
LISTED = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe"),
    *("tekken", "qwen2", "deepseek-r1-qwen", "megrez", "qwen35", "gpt-4o", "llama4", "kanana2", "minimax-m2"),
)


def words(pre: Any, text: str) -> list[str]:
    return [word for word, _ in pre.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", LISTED)
def test_words_are_those_of_transformers_table(name: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = PRE_TOKENIZERS[name].build()
    for text in CORPUS:
        assert words(ours, text) == words(theirs, text)


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("command-r", "cohere.tokenization_cohere", "CohereTokenizer"),
        ("olmo", "gpt_neox.tokenization_gpt_neox", "GPTNeoXTokenizer"),
        ("qwen2", "qwen2.tokenization_qwen2", "Qwen2Tokenizer"),
        ("qwen35", "qwen3_5.tokenization_qwen3_5", "Qwen3_5Tokenizer"),
        ("gpt-2", "gpt2.tokenization_gpt2", "GPT2Tokenizer"),
    ],
)
def test_words_and_normalizers_are_those_of_transformers_tokenizers(name: str, module: str, kind: str) -> None:
    import importlib

    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), kind)().backend_tokenizer
    ours = PRE_TOKENIZERS[name]
    assert (type(theirs.normalizer).__name__ == "NFC") == ours.is_nfc
    for text in CORPUS:
        assert words(ours.build(), text) == words(theirs.pre_tokenizer, text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("exaone", "it's 12\u0663", ["it", "'s", "Ġ", "1", "2", "Ù£"]),
        ("glm4", "IT'S 1234 a\n\n b", ["IT", "'S", "Ġ", "123", "4", "Ġa", "ĊĊ", "Ġb"]),
        ("stablelm2", "IT'S 12", ["IT", "'S", "Ġ", "1", "2"]),
        ("tekken", "aBc'd 12!/\n", ["a", "Bc", "'d", "Ġ", "1", "2", "!/Ċ"]),
        ("gpt-4o", "aBc'd 12!/\n", ["a", "Bc'd", "Ġ", "12", "!/Ċ"]),
        ("seed-coder", "a!\n\nb 12", ["a", "!", "ĊĊ", "b", "Ġ", "1", "2"]),
        ("deepseek-llm", "ab! 12\n c", ["ab", "!", "Ġ", "1", "2", "Ċ", "Ġc"]),
        ("deepseek-llm", "it's \u4f60\u597d\u3002x", ["it", "'", "s", "Ġ", "ä½łå¥½", "ãĢĤ", "x"]),
        ("deepseek-coder", "ab!? 12\n c", ["ab", "!?", "Ġ", "1", "2", "Ċ", "Ġc"]),
        ("deepseek-v3", "ab 1234 c'd!\n x", ["ab", "Ġ", "123", "4", "Ġc", "'d", "!Ċ", "Ġx"]),
        ("deepseek-v3", "x\u4f60\u597d\u3042y", ["x", "ä½łå¥½ãģĤ", "y"]),
    ],
)
def test_words(name: str, text: str, expected: list[str]) -> None:
    assert words(PRE_TOKENIZERS[name].build(), text) == expected


def test_what_begins_with_bos_and_looks_words_up() -> None:
    begins = {name for name, pre in PRE_TOKENIZERS.items() if pre.adds_bos}
    assert begins == {name for name, pre in PRE_TOKENIZERS.items() if pre.ignores_merges}
    assert {"tekken", "lfm2", "llama-bpe"} <= begins
    assert begins.isdisjoint({"dbrx", "glm4", "smaug-bpe", "qwen2", "gpt-4o", "deepseek-v3"})
