"""Tokenizer against transformers, on the demo model's GGUF vocabulary and on folders made here."""

# ruff: noqa: RUF001 - the texts are meant to be unusual
import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from frontend.text.tokenizer import Tokenizer, _from_gguf
from ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.files.gguf_vocabulary import PRE_TOKENIZERS, build_gguf_tokenizer
from ipc.files.model_files import read_chat_template, read_tokenizer_files, resolve_model

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\t\ttabs \n\n\n new lines\r\n  ",
    " " * 70 + "x" + "\n" * 40 + "\t" * 9,
    "It's we'll they're I'd you've I'm don't IT'S WE'LL",
    "0 1 12 123 1234567890 3.14159 -1e-10 0xDEADBEEF v2.0.1  7   8\n 9 ½ ² ⅷ ٣٤ 一",
    "def f(x: int) -> int:\n    return x ** 2  # comment\n\n\tif (a && b) { c[i++] += 1; }",
    "naïve café Ångström ﬁ e\u0301 \u00a0\u2003\u200b\ufeff \u2028",
    "你好，世界。日本語のテキスト 한국어 ไทย हिन्दी தமிழ்",
    "שלום עולם مرحبا بالعالم \u202eabc\u202c",
    "👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ \U0001f9d1\U0001f3fb\u200d\U0001f4bb \U0010ffff",
    "\x00\x01\x7f\x80 \ufffd \ue000",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|><|endoftext|> <repo_name>x<file_sep> <|im_start|",
    "https://example.org/a?b=c&d=%20#e <html><b>&amp;</b></html> $x^2$ \\frac{1}{2}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AAAAAAAAAAAAAAAAAA !!!!!!!!!!!!!!!!!!!",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(read_tokenizer_files(resolve_model(None)))


@pytest.fixture(scope="module")
def oracle() -> Any:
    path = resolve_model(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        oracle = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers splits every GGUF of kind gpt2 by GPT-2's expression alone; SmolLM2's own tokenizer.json (and
    # llama.cpp) isolate digits first, which differs where whitespace precedes a digit.
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_equal_transformers_and_decode_to_the_text(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == oracle.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_special_ids_equal_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id) == (1, 2)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    added = oracle.added_tokens_decoder.items()
    assert tokenizer.special_token_ids == {token_id for token_id, token in added if token.special} == set(range(17))
    assert tokenizer.vocab_size == len(oracle) == 49152
    assert tokenizer.chat_template == oracle.chat_template


# The vocabulary has no token for these bytes, nor for those that begin the code points from U+40000 to U+FFFFF.
_SPELLABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d", exclude_categories=["Cs"]
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.text(_SPELLABLE, max_size=60))
@example("\u0300\u0301")
def test_any_text_comes_back(text: str) -> None:
    tokenizer = _demo()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_batch_equals_single(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(CORPUS) == [tokenizer.encode(text) for text in CORPUS]


def test_chat_marker_is_one_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]
    assert tokenizer.decode([1, *tokenizer.encode("user"), 2], skip_special_tokens=True) == "user"


def test_unknown_ids_add_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 5, *tokenizer.encode("a")], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("text", [3, b"bytes", None, ["a"]])
def test_prompt_that_is_no_text_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a str"):
        tokenizer.encode(text)
    with pytest.raises(InvalidRequestError, match="must be a str"):
        tokenizer.encode_batch([text])


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        tokenizer.encode("a\ud800b")


# --- GGUF vocabularies made here ----------------------------------------------------------------------------------


def _metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A vocabulary of the 256 bytes, a few merges and four added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ Ġ", "1 2", "12 3", "Ġ 1", "a b", "' S", "Ġ '"]
    words = [merge.replace(" ", "") for merge in merges]
    added = ["<s>", "</s>", "<think>", "<｜end▁of▁text｜>", "abcab"]
    tokens = [*alphabet, *words, *added]
    types = [1] * (len(tokens) - 5) + [3, 3, 4, 3, 1]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }
    metadata.update({f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "  1 123 'S", ["Ġ", "Ġ1", "Ġ", "123", "Ġ'", "S"]),
        ("default", "  1 123", ["Ġ", "Ġ1", "Ġ", "123"]),
        ("smollm", "  1 123", ["ĠĠ", "1", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "  1231 'S", ["Ġ", "Ġ", "123", "1", "Ġ'", "S"]),
        ("llama-bpe", "a'S", ["a", "'S"]),
        ("gpt-2", "a'S", ["a", "'", "S"]),
        ("qwen2", "  1231", ["Ġ", "Ġ", "1", "2", "3", "1"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
        ("gpt-4o", "  1231'S/\n", ["Ġ", "Ġ", "123", "1", "'S", "/", "Ċ"]),
        ("gpt-4o", "a'Sab", ["a", "'S", "ab"]),
        ("gpt-4o", "abAB ab", ["ab", "A", "B", "Ġ", "ab"]),
        ("llama-bpe", "abcab", ["abcab"]),  # a word its merges do not reach
        ("gpt-2", "abcab", ["ab", "c", "ab"]),
    ],
)
def test_pre_tokenizer(pre: str, text: str, words: list[str]) -> None:
    assert build_gguf_tokenizer(_metadata(pre, add_bos_token=False)).encode(text).tokens == words


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_comes_back_under_every_pre_tokenizer(pre: str) -> None:
    hf = build_gguf_tokenizer(_metadata(pre))
    for text in CORPUS:
        expected = hf.normalizer.normalize_str(text) if hf.normalizer else text
        assert hf.decode(hf.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == expected


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(_metadata()))
    ids = tokenizer.encode("<think>a</s><｜end▁of▁text｜>")
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>a</s><｜end▁of▁text｜>"
    assert len(tokenizer.special_token_ids) == 3


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos(pre: str, add_bos: bool | None, expected: bool) -> None:
    metadata = _metadata(pre, add_bos_token=add_bos)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    hf = build_gguf_tokenizer(metadata)
    assert (hf.encode("a").ids[0] == bos) is expected
    assert hf.encode("a", add_special_tokens=False).ids[0] != bos


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": None}, ModelFileError, "tokenizer.ggml.model is missing"),
        ({"model": "rwkv"}, UnsupportedModelError, "'rwkv'"),
        ({"model": "bert", "unknown_token_id": None}, ModelFileError, r"no \[CLS\]"),
        ({"pre": "kimi-k2"}, UnsupportedModelError, "'kimi-k2'"),
        ({"tokens": None}, ModelFileError, "tokens must be a list"),
        ({"tokens": ["a", 3]}, ModelFileError, "only str"),
        ({"tokens": ["a", "a"]}, ModelFileError, "1 tokens twice"),
        ({"merges": None}, ModelFileError, "merges must be a list"),
        ({"merges": ["a c"]}, ModelFileError, r"merges\[0\] is 'a c'"),
        ({"merges": ["a"]}, ModelFileError, r"merges\[0\] is 'a'"),
        ({"token_type": [1]}, ModelFileError, "1 entries for"),
        ({"bos_token_id": 9999}, ModelFileError, "bos_token_id is 9999"),
        ({"bos_token_id": None, "add_bos_token": True}, ModelFileError, "bos_token_id is missing"),
    ],
)
def test_bad_gguf_vocabulary(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build_gguf_tokenizer(_metadata(**{"pre": "gpt-2", **changes}))
    assert caught.type is error


# --- folders ------------------------------------------------------------------------------------------------------


def _folder(**files: Any) -> dict[str, bytes]:
    hf = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<s>", "</s>", "<|end|>"])
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    hf.enable_truncation(1)
    hf.enable_padding(length=9)
    content = {"tokenizer.json": hf.to_str().encode()}
    for name, value in files.items():
        content[f"{name}.json"] = value if isinstance(value, bytes) else json.dumps(value).encode()
    return content


def test_folder() -> None:
    tokenizer = Tokenizer.from_files(
        _folder(
            tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "chat_template": "T"},
            generation_config={"eos_token_id": [4, 5]},
            config={"eos_token_id": 0},
        )
    )
    assert tokenizer.encode("abb") == [3, 2, 1], "the post-processor decides on BOS; truncation and padding are off"
    assert tokenizer.encode("abb", add_special_tokens=False) == [2, 1]
    assert tokenizer.encode_batch(["abb", "a"]) == [[3, 2, 1], [3, 0]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (3, 5, (5, 4))
    assert tokenizer.chat_template == "T"


def test_folder_with_little() -> None:
    tokenizer = Tokenizer.from_files(_folder(config={"eos_token_id": 4}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (None, 4, None)
    assert Tokenizer.from_files(_folder()).eos_token_id is None
    assert Tokenizer.from_files(_folder(special_tokens_map={"eos_token": "</s>"})).eos_token_id == 4


def test_chat_template_sources() -> None:
    named = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    files = _folder(tokenizer_config={"chat_template": named})
    assert Tokenizer.from_files(files).chat_template == "B"
    assert Tokenizer.from_files(files | {"chat_template.jinja": b"C"}).chat_template == "C"
    assert Tokenizer.from_files(_folder(tokenizer_config={"chat_template": named[:1]})).chat_template is None
    older = _folder(chat_template={"chat_template": "J"})  # chat_template.json
    assert Tokenizer.from_files(older).chat_template == "J"
    assert Tokenizer.from_files(older | files).chat_template == "B"
    assert Tokenizer.from_files(older | {"chat_template.jinja": b"C"}).chat_template == "C"


def test_a_given_template_takes_the_place_of_all(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    files = _folder(tokenizer_config={"chat_template": named})
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    for template in (str(tmp_path / "own.jinja"), "{{ messages[0].content }}!"):
        tokenizer = Tokenizer.from_files(files | read_chat_template(template))
        assert tokenizer.chat_templates == {"default": "{{ messages[0].content }}!"}
    assert Tokenizer.from_files(files | read_chat_template(None)).chat_template == "B"
    with pytest.raises(ModelFileError, match="is not a file on this machine, and not a template"):
        read_chat_template("/no/such/file.jinja")
    with pytest.raises(ModelFileError, match="given-chat-template: the chat template is not valid Jinja"):
        Tokenizer.from_files(files | read_chat_template("{% for"))


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
def test_named_chat_templates_as_transformers_saves_them(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_bytes(_folder()["tokenizer.json"])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = {"default": "D{{ tools }}", "tool_use": "T", "rag": "R"}  # type: ignore[assignment]
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    ours = Tokenizer.from_files(read_tokenizer_files(tmp_path))
    assert ours.chat_templates == theirs.chat_template
    chat, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]
    assert ours.apply_chat_template(chat, tools, tokenize=False) == "T"
    assert theirs.apply_chat_template(chat, tools, tokenize=False) == "T"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json is missing .found no file at all"),
        ({"config.json": b"{}", "tokenizer.model": b""}, "found config.json, tokenizer.model"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer.json": b"\xff"}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer.json": b'{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}}'}, "contradicts itself"),
        (_folder(tokenizer_config=b"{"), "tokenizer_config.json is not JSON"),
        (_folder(generation_config=b"[]"), "generation_config.json must contain a JSON object"),
        (_folder() | {"chat_template.jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
        (_folder() | {"additional_chat_templates/a.jinja": b"\xff"}, r"additional_chat_templates/a\.jinja is not UTF"),
        (_folder(chat_template=b"{"), "chat_template.json is not JSON"),
        ({"gguf-header": b"GGUF"}, "GGUF"),
    ],
)
def test_bad_files(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_files(files)


_DEMO: list[Tokenizer] = []


def _demo() -> Tokenizer:
    """The demo tokenizer for hypothesis, which does not take module fixtures without complaint."""
    if not _DEMO:
        _DEMO.append(Tokenizer.from_files(read_tokenizer_files(resolve_model(None))))
    return _DEMO[0]


def test_named_chat_templates_of_a_folder_and_of_a_gguf_file() -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "x"}, 3]
    folder = Tokenizer.from_files(_folder(tokenizer_config={"chat_template": named}))
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_chat_template(named[:2])
    added = {key: field.value for key, field in writer.kv_data[0].items() if key.startswith("tokenizer.")}
    metadata = {**_metadata(), **added}
    for tokenizer in (folder, _from_gguf(metadata)):
        assert tokenizer.chat_template == "D"
        choose = tokenizer.choose_chat_template
        assert [choose(None, with_tools=tools) for tools in (False, True)] == ["D", "T"]
        assert [choose(given, with_tools=False) for given in ("tool_use", "{{ other }}")] == ["T", "{{ other }}"]
    plain = Tokenizer.from_files(_folder(tokenizer_config={"chat_template": "P"}))
    assert plain.choose_chat_template(None, with_tools=True) == "P"
    none = Tokenizer.from_files(_folder())
    assert none.choose_chat_template(None, with_tools=True) is None


def test_what_ends_a_generation_in_a_gguf_file() -> None:
    """Three keys, and control tokens of these names, as xllamacpp 2026.10 prints its end tokens for such files."""

    def ends(added: list[str], kind: int = 3, **ids: str) -> list[str]:
        metadata = _metadata()
        tokens = metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *added]
        metadata["tokenizer.ggml.token_type"] += [kind] * len(added)
        metadata |= {f"tokenizer.ggml.{name}_token_id": tokens.index(token) for name, token in ids.items()}
        return [tokens[token] for token in _from_gguf(metadata).eos_token_ids]

    assert ends(["<|im_start|>", "<|observation|>"], eom="<|observation|>") == ["</s>", "<|observation|>"]
    assert ends(["<|user|>", "<|observation|>"], eot="<|user|>", eom="<|observation|>")[1:] == [
        "<|user|>",
        "<|observation|>",
    ]
    assert ends(["<|im_start|>", "<|im_end|>"]) == ["</s>", "<|im_end|>"]
    assert ends(["<|end_of_text|>", "<|eot_id|>"], eos="<|eot_id|>") == ["<|eot_id|>", "<|end_of_text|>"]
    assert ends(["<|im_end|>", "<|end|>"], kind=1) == ["</s>"]  # words of the text
    assert ends(["<|im_end|>"], kind=4) == ["</s>"]
    assert ends(["<|end|>", "<|user|>"]) == ["</s>", "<|end|>"]
    assert ends(["<|end|>", "<|return|>", "<|call|>"]) == ["</s>", "<|return|>", "<|call|>"]


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_ends_of_a_byte_level_vocabulary(name: str) -> None:
    metadata = _metadata(**{f"add_{name}_token": True})
    ids = [metadata[f"tokenizer.ggml.{end}_token_id"] for end in ("bos", "eos")]
    letter = metadata["tokenizer.ggml.tokens"].index("a")
    found = build_gguf_tokenizer(metadata).encode("a").ids
    assert found == ([ids[0], letter] if name == "bos" else [letter, ids[1]])
