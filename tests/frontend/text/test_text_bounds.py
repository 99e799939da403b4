"""TextBound: no text has fewer tokens than it says. And a text in parts has the tokens of the whole."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from frontend.text import tokenizer as tokenizer_module
from frontend.text.prompts import read_prompts
from frontend.text.text_cuts import text_bound, text_cuts
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError, PromptTooLongError
from ipc.files.model_files import read_tokenizer_files, resolve_model
from tests.frontend.text.text_kinds import tokenizer_of

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_files(read_tokenizer_files(resolve_model(None)))


def byte_level(*merged: str, missing: str = "") -> tokenizers.Tokenizer:
    names = [name for name in ALPHABET if name not in missing] + list(merged)
    merges = [(name[:-1], name[-1]) for name in merged]
    hf = tokenizers.Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return hf


def random_text(draw: random.Random) -> str:
    piece = draw.choice([" ", "#", "\n" + " " * 80, "aé", "\x04", "\N{GRINNING FACE}", "12", "<|im_end|>", "word "])
    return piece * draw.randrange(1, 200)


@pytest.mark.parametrize("seed", range(40))
def test_no_text_has_fewer(demo: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(random_text(draw) for _ in range(draw.randrange(1, 6)))
    assert demo.bound.fewest_tokens(text) <= len(demo.encode(text, add_special_tokens=False))


def test_the_demo_models(demo: Tokenizer) -> None:
    assert demo.bound.longest == 81
    assert demo.bound.fewest_tokens("#" * 8100) == 100
    assert demo.bound.fewest_tokens("\x04" * 8100) == 0  # a byte that its vocabulary does not have: no token
    assert demo.encode("\x04" * 8100, add_special_tokens=False) == []


def test_a_text_that_cannot_fit_is_not_read(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(texts: object, special: bool = True) -> list[list[int]]:
        raise AssertionError("the text was read")

    limits = {"vocab_size": 49152, "max_model_len": 100}
    monkeypatch.setattr(demo, "encode_batch", read)
    with pytest.raises(PromptTooLongError, match="101 tokens or more; at most 99 fit: the maximum"):
        read_prompts(["#" * 8101], demo, **limits)
    with pytest.raises(AssertionError, match="was read"):  # these may fit
        read_prompts(["#" * 8019], demo, **limits)
    with pytest.raises(AssertionError, match="was read"):  # this one is cut
        read_prompts(["#" * 8101], demo, truncation=[5], **limits)


def test_steps_that_lose_text_have_no_bound() -> None:
    hf = byte_level("aa", "aaa")
    assert text_bound(hf) == (3, b"")
    assert text_bound(byte_level("aa", missing="b")) == (2, b"b")
    hf.normalizer = normalizers.NFC()
    assert text_bound(hf).longest == 9
    for normalizer in (normalizers.Strip(), normalizers.NFKC(), normalizers.Replace("  ", " ")):
        hf.normalizer = normalizers.Sequence([normalizers.NFC(), normalizer])
        assert text_bound(hf).longest == 0
    hf.normalizer = normalizers.Replace(" ", "__")
    assert text_bound(hf).longest == 3
    hf.add_tokens([AddedToken("<long token>")])
    assert text_bound(hf).longest == len("<long token>")
    hf.add_tokens([AddedToken("<eats>", rstrip=True)])
    assert text_bound(hf).longest == 0
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert text_bound(words).longest == 0
    pieces = byte_level("aa")
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert text_bound(pieces).longest == 0


@pytest.mark.parametrize("seed", range(5))
def test_texts_of_many_calls_have_the_ids_of_one(demo: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    texts = ["".join(random_text(draw) for _ in range(draw.randrange(3))) for _ in range(20)]
    wanted = [demo.hf.encode(text).ids for text in texts]
    monkeypatch.setattr(tokenizer_module, "_CALL_CHARS", 300)
    assert demo.encode_batch(texts) == wanted
    assert [demo.encode(text) for text in texts] == wanted
    ids = [token for one in wanted for token in one]
    monkeypatch.setattr(tokenizer_module, "_MANY_IDS", 5)
    assert demo.decode(ids) == demo.hf.decode(ids, skip_special_tokens=False)


#: The pattern of words of GPT-4's kind.
GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PROSE = [
    "word",
    " fox",
    " Don't",
    " it's",
    "  12",
    "345",
    "\n\n",
    "\nline",
    " naïve",
    "。",
    "你好",
    "\uff0c",
    "\t",
    "   ",
    " x=1;",
    "<|e|>",
]


#: Words of other scripts, between which there are spaces, line ends or marks.
OTHER_PROSE = [
    "\n\u0441\u043b\u043e",
    " \u03bb\u03ad\u03be",
    " \u0643\u0644\u0645\u0629",
    " \u0936\u092c\u094d\u0926",
    " \ud55c\uad6d",
    "\u6587\u5b57\u3002",
]
OTHER_PROSE += [" word", " e\u0301", " \u01c5", " \u00aa", "\ufb01", ", ", "12"]
CYRILLIC = [" \u0441\u043b\u043e\u0432\u043e", " \u043d\u0435\u0431\u043e"]


def split_by(pattern: str, *merged: str) -> tokenizers.Tokenizer:
    hf = byte_level(*merged)
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    hf.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return hf


def cut_kinds() -> dict[str, tokenizers.Tokenizer]:
    merged = ("wo", "wor", "word", "Ġw", "Ġf", "Ġfo", "Ġfox", "12", "34", "345", "ĊĊ", "ne", "in", "ine", "ĠĠ", "ĠĠĠ")
    with_nfc = split_by(GPT_4, *merged)
    with_nfc.normalizer = normalizers.NFC()
    with_tokens = byte_level(*merged)
    with_tokens.add_special_tokens(["<|e|>"])
    return {"gpt-2": with_tokens, "gpt-4": split_by(GPT_4, *merged), "nfc": with_nfc}


@pytest.mark.parametrize("kind", cut_kinds())
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("words", [PROSE, OTHER_PROSE, CYRILLIC], ids=["", "other", "cyrillic"])
def test_parts_have_the_tokens_of_the_whole(kind: str, seed: int, words: list[str]) -> None:
    hf, draw = cut_kinds()[kind], random.Random(seed)
    text = "".join(draw.choice(words) for _ in range(1000))
    cuts = text_cuts(hf)
    assert cuts is not None

    def encode(part: str) -> list[int]:
        return hf.encode_batch_fast([part], add_special_tokens=False)[0].ids  # type: ignore[no-any-return]

    parts = list(cuts.parts_of(text, 500))
    assert "".join(parts) == text
    assert len(parts) > len(text) // 500
    assert [token for part in parts for token in encode(part)] == encode(text)


def xlm_roberta() -> tokenizers.Tokenizer:
    """XLM-R's kind: words first, and runs of spaces are one; its mask takes the spaces before it."""
    tokens = [token for token in tokenizer_of("unigram").hf.get_vocab() if not token.startswith("<")]
    hf = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((one, -len(one) / 7) for one in tokens)], 0, False))
    hf.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    hf.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    hf.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return hf


SPACED = (
    "metaspace first",
    "metaspace always",
    "metaspace never",
    "llama 2",
    "gguf llama",
    "gguf gemma",
    "unigram",
    "word piece",
)
WITH_SPACES = [
    *PROSE,
    *OTHER_PROSE,
    " Hello",
    " world",
    " does",
    " café",
    "  <mask>",
    "<s>",
    "\u2581",
    " \u2581x",
    "\ufdfa",
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [*SPACED, "xlm roberta"])
def test_parts_have_the_tokens_of_the_whole_with_words_that_begin_with_spaces(kind: str, seed: int) -> None:
    hf = xlm_roberta() if kind == "xlm roberta" else tokenizer_of(kind).hf
    draw = random.Random(seed)
    text = "".join(draw.choice(WITH_SPACES) for _ in range(1500))
    cuts = text_cuts(hf)
    assert cuts is not None
    parts = list(cuts.parts_of(text, 500))
    assert len(parts) > len(text) // 500
    ids = [token for part in parts for token in hf.encode(part, add_special_tokens=False).ids]
    assert ids == hf.encode(text, add_special_tokens=False).ids


def test_texts_that_are_one_word_are_cut_only_where_no_token_goes_on() -> None:
    """And if the model looks at a whole word, or adds up scores from its beginning, they are not cut."""
    names = ["\u2581", "a", "b", "a\u2581", "a\u2581b", "ab"]
    vocabulary = {name: index for index, name in enumerate(names)}
    across = models.BPE(vocabulary, [("a", "\u2581"), ("a\u2581", "b"), ("a", "b")])
    apart = {"vocab": {"\u2581": 0, "a": 1, "b": 2, "ab": 3}, "merges": [("a", "b")]}
    one_word = pre_tokenizers.Metaspace(split=False)
    for model, is_cut in (
        (across, False),
        (models.BPE(**apart), True),
        (models.BPE(**apart, ignore_merges=True), False),
        (models.BPE(**apart, dropout=0.5), False),
        (models.Unigram([(name, 0.0) for name in names], 0, False), False),
    ):
        hf = tokenizers.Tokenizer(model)
        hf.pre_tokenizer = one_word
        assert (text_cuts(hf) is not None) == is_cut
    hf.model = across
    hf.pre_tokenizer = pre_tokenizers.Metaspace()  # each word by itself
    assert text_cuts(hf) is not None
    hf.normalizer = normalizers.Replace(tokenizers.Regex("a.*b"), "a")
    assert text_cuts(hf) is None


def test_a_long_text_is_encoded_in_parts(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the whole was, with its special tokens around it; one part at a time is in memory."""
    draw = random.Random(0)
    text = "".join(draw.choice(PROSE) for _ in range(3000)) + "7" * 3000
    demo.hf.post_processor = processors.TemplateProcessing("<|im_start|> $A <|im_end|>", None, demo_marks(demo))
    wanted = demo.encode(text), demo.encode(text, add_special_tokens=False)
    lengths = list[int]()
    at_once = demo._encode_at_once

    def noted(texts: list[str], special: bool) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return at_once(texts, special)

    monkeypatch.setattr(demo, "_encode_at_once", noted)
    monkeypatch.setattr(tokenizer_module, "_CALL_CHARS", 600)
    try:
        assert (demo.encode(text), demo.encode(text, add_special_tokens=False)) == wanted
    finally:
        demo.hf.post_processor = None
    assert max(lengths) <= 600


def demo_marks(demo: Tokenizer) -> list[tuple[str, int]]:
    return [(name, token) for name, token in demo.special_tokens().items() if name in ("<|im_start|>", "<|im_end|>")]


def test_a_text_without_a_cut_is_whole() -> None:
    hf = split_by(GPT_4)
    cuts = text_cuts(hf)
    assert cuts is not None
    for text in ("7" * 5000, "#" * 5000, " " * 5000):
        assert list(cuts.parts_of(text, 500)) == [text]


def test_a_long_part_without_a_cut_is_refused_where_that_is_asked_for(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_CALL_CHARS", 600)
    cut, uncut = "word fox " * 300, "word " * 300 + "\u044f" * 1000
    wanted = demo.encode(cut), demo.encode(uncut)
    monkeypatch.setattr(demo, "most_uncut", 1999)
    assert demo.encode(cut) == wanted[0]
    with pytest.raises(
        InvalidRequestError, match=r"has 2\d\d\d bytes in a row without a space between two words; at m"
    ):
        demo.encode(uncut)
    monkeypatch.setattr(demo, "most_uncut", 4000)
    assert demo.encode(uncut) == wanted[1]


def test_a_cut_that_changes_tokens_is_not_made() -> None:
    """A pattern whose words go on behind a space looks like the others: each cut is tried with what is beside it."""
    hf = split_by(r"[a-z]+ [a-z]+|\s", "fo", "fox", "foxĠ", "foxĠf")
    text = " ".join(["fox"] * 2000)
    cuts = text_cuts(hf)
    assert cuts is not None

    def encode(part: str) -> list[int]:
        return hf.encode_batch_fast([part], add_special_tokens=False)[0].ids  # type: ignore[no-any-return]

    parts = list(cuts.parts_of(text, 500))
    assert [token for part in parts for token in encode(part)] == encode(text)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.Prepend("x")},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Metaspace(split=False)},
        {"pre_tokenizer": pre_tokenizers.Split(tokenizers.Regex(r"(?<=a)b"), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(tokenizers.Regex(r"a(?=.*b)"), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"model": models.Unigram([("a", 0.0)], 0, False)},
    ],
    ids=str,
)
def test_tokenizers_whose_texts_are_not_cut(change: dict[str, object]) -> None:
    hf = byte_level()
    for name, value in change.items():
        setattr(hf, name, value)
    assert text_cuts(hf) is None


def test_tokens_that_look_at_what_is_beside_them_are_not_cut_off() -> None:
    for options in ({"lstrip": True}, {"rstrip": True}, {"single_word": True}):
        hf = byte_level()
        hf.add_tokens([AddedToken("fox", **options)])
        assert text_cuts(hf) is None
    hf = byte_level()
    hf.add_tokens(["a fox"])
    assert text_cuts(hf) is None
