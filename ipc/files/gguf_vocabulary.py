"""GGUF vocabularies: build a `tokenizers.Tokenizer` from a GGUF file's metadata.

A GGUF file has no tokenizer.json. It names a vocabulary kind (`tokenizer.ggml.model`) and a pre-tokenizer
(`tokenizer.ggml.pre`: ipc/files/gguf_vocabulary.py), and lists tokens, token types and merges. SentencePiece
vocabularies have scores instead of merges (ipc/files/gguf_vocabulary.py, and ipc/files/gguf_vocabulary.py), and
WordPiece ones have neither (ipc/files/gguf_wordpiece.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import GgufValue, gguf_tokens
from ipc.files.gguf_strings import GgufStrings
from ipc.files.gguf_wordpiece import build_wordpiece

# PRE_TOKENIZERS: how text is split before the merges of byte-level BPE, by its name in a GGUF file.
#
# Names (tokenizer.ggml.pre) are llama.cpp's. Splits and normalizers are those of the tokenizer.json that the models
# were published with, because their merges were learned on text split that way.


class PreTokenizer(NamedTuple):
    """One way of splitting. Without `splits`, words are those of GPT-2."""

    splits: tuple[str, ...] = ()  # expressions whose matches are words, one after the other
    has_digits: bool = False  # each digit is a word
    is_nfc: bool = False  # text is normalized to NFC
    #: A word of the vocabulary is a token, even if the merges do not produce it.
    ignores_merges: bool = False
    adds_bos: bool = False  # if the file does not say

    def build(self) -> Any:
        """Return the pre-tokenizer of the tokenizers library."""
        steps: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(each), behavior="isolated") for each in self.splits]
        steps += [pre_tokenizers.Digits(individual_digits=True)] if self.has_digits else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits)
        return pre_tokenizers.Sequence([*steps, last]) if steps else last


#: Llama 3's expression, for any number of digits in a group.
_BY_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: o200k's: a word begins with capitals and continues with small letters, and includes an 's.
_BY_CASE = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS, _ONE_DIGIT = _BY_DIGITS.format(digits="{1,3}"), _BY_DIGITS.format(digits="")
#: Qwen 3.5's: combining marks count as letters.
_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Seed's: line ends are separate words.
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Ideographs and the characters that DeepSeek's first vocabularies group with them.
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
#: The published expression lists cased letters one by one, without mathematical ones.
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1d400}-\x{1d7ff}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_GPT2, _DIGITS = PreTokenizer(), PreTokenizer(has_digits=True)
_LLAMA3 = PreTokenizer((_THREE_DIGITS,), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_ONE_DIGIT,), is_nfc=True)
_GPT4O = PreTokenizer((_BY_CASE.format(ending="(?i:'s|'t|'re|'ve|'m|'ll|'d)?", digits="{1,3}"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "exaone4", "granite-docling", "mpt", "jais"), _GPT2),
    "olmo": _GPT2._replace(is_nfc=True),  # GPT-NeoX's
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone", "codeshell", "minerva-7b"), _DIGITS),
    "command-r": _DIGITS._replace(is_nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_THREE_DIGITS,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"), PreTokenizer((_ONE_DIGIT,))),
    "qwen35": PreTokenizer((_WITH_MARKS,), is_nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_BY_CASE.format(ending="", digits=""),), ignores_merges=True, adds_bos=True),
    "seed-coder": PreTokenizer((_SEED,)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM, has_digits=True),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER, has_digits=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3)),
}


#: Kinds of vocabularies with SentencePiece's spaces and bytes.
SENTENCEPIECE_KINDS = ("llama", "gemma4")

# Token types of llama.cpp: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

#: Tokens that end a generation: end of text, of a turn, and of a message that calls a tool.
GGUF_ENDS = ("eos", "eot", "eom")
#: Names of control tokens that always end a generation, as in llama.cpp: files made before a key existed name only one
#: end. llama.cpp's end-of-file tokens within code are left out.
_END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|ifm|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[e~[", "<|return|>"),
        *("<|eom_id|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
        *("<|endoftext|>", "<|end_of_text|>", "[EOS]", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_MESSAGE_ENDS = frozenset(("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"))

_Item = TypeVar("_Item", str, int, float)


def build_gguf_tokenizer(metadata: Mapping[str, GgufValue]) -> tokenizers.Tokenizer:
    """Return the tokenizer that this metadata describes: "gpt2" is byte-level BPE, "llama" is SentencePiece with
    merges by scores, "gemma4" with listed merges, "t5" SentencePiece's unigram model, "bert" is WordPiece.

    Control tokens and the unknown token become special tokens. User-defined ones (`<think>`) become added tokens, which
    are matched as a whole but are part of the text. Errors: UnsupportedModelError naming a vocabulary or pre-tokenizer
    that is not supported; ModelFileError for lists that are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelFileError("the GGUF file has no tokenizer: tokenizer.ggml.model is missing")
    if kind not in ("gpt2", *SENTENCEPIECE_KINDS, "t5", "bert"):
        raise UnsupportedModelError(
            f"the GGUF file's vocabulary is of kind {kind!r}; only 'gpt2' (byte-level BPE), 'llama' (SentencePiece "
            "with scores), 'gemma4' (with merges), 't5' (unigram) and 'bert' (WordPiece) are supported"
        )
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocabulary) != len(tokens):
        raise ModelFileError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} tokens twice")
    types = _per_token(metadata, "tokenizer.ggml.token_type", int, tokens, default=_NORMAL)
    if kind == "bert":
        names = ("cls", "seperator", "unknown")
        return build_wordpiece(tokens, types, {name: gguf_token_id(metadata, name) for name in names})
    if kind == "t5":
        tokenizer = _unigram(metadata, tokens)
    else:
        is_byte_level = kind == "gpt2"
        tokenizer = _byte_level(metadata, vocabulary) if is_byte_level else _sentencepiece(metadata, vocabulary, types)
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
    )
    _add_ends(tokenizer, tokens, metadata)
    return tokenizer


def gguf_token_id(metadata: Mapping[str, GgufValue], name: str) -> int | None:
    """Return the id under `tokenizer.ggml.<name>_token_id`; None when the file does not name one. Errors:
    ModelFileError.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    count = len(gguf_tokens(metadata) or ())
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < count:
        raise ModelFileError(f"{key} is {token_id!r}; the vocabulary has {count} tokens")
    return token_id


def gguf_end_ids(metadata: Mapping[str, GgufValue]) -> list[int]:
    """Return the ids of the control tokens that end a generation because of their names, ascending.

    In vocabularies with several kinds of message ends (gpt-oss), `<|end|>` ends one of several messages of a turn.
    Errors: ModelFileError.
    """
    if "tokenizer.ggml.token_type" not in metadata:
        return []
    given = metadata.get("tokenizer.ggml.tokens")
    tokens = given if isinstance(given, GgufStrings) else _list(metadata, "tokenizer.ggml.tokens", str)
    types = _per_token(metadata, "tokenizer.ggml.token_type", int, tokens)
    ends = {token: at for at, kind in enumerate(types) if kind == _CONTROL and (token := tokens[at]) in _END_NAMES}
    if _MESSAGE_ENDS & ends.keys():
        ends.pop("<|end|>", None)
    return list(ends.values())


def _byte_level(metadata: Mapping[str, GgufValue], vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    pre = _pre_tokenizer(metadata)
    merges = _merges(metadata, vocabulary)
    # Llama 3's vocabulary has words that its merges cannot produce; its own tokenizer.json first looks up whole words.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignores_merges))
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(metadata: Mapping[str, GgufValue]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF file's pre-tokenizer is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(
    metadata: Mapping[str, GgufValue], vocabulary: dict[str, int], types: Sequence[int]
) -> tokenizers.Tokenizer:
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if metadata.get(key):
            raise UnsupportedModelError(f"the GGUF file's tokenizer normalizes text by {key}, which is not supported")
    if "tokenizer.ggml.merges" in metadata or metadata["tokenizer.ggml.model"] == "gemma4":
        merges = _merges(metadata, vocabulary)
    else:
        scores = _per_token(metadata, "tokenizer.ggml.scores", float, list(vocabulary))
        merges = merges_of_scores(vocabulary, scores, types)
    return build_sentencepiece(
        vocabulary,
        merges,
        unknown=gguf_token_id(metadata, "unknown"),
        add_space_prefix=_flag(
            metadata, "tokenizer.ggml.add_space_prefix", default=metadata["tokenizer.ggml.model"] == "llama"
        ),
    )


def _unigram(metadata: Mapping[str, GgufValue], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    scores = _per_token(metadata, "tokenizer.ggml.scores", float, tokens)
    key = "tokenizer.ggml.precompiled_charsmap"
    characters = _list(metadata, key, int) if metadata.get(key) else []
    if any(not 0 <= byte < 256 for byte in characters):
        raise ModelFileError(f"{key} must hold only bytes")
    return build_unigram(tokens, scores, gguf_token_id(metadata, "unknown"), characters)


def _merges(metadata: Mapping[str, GgufValue], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Read and check the merges. The library panics (an exception outside Exception) on a merge whose result is not a
    token.

    vocabulary: ids by token, in the order of the ids.
    """
    merges, tokens = [], list(vocabulary)
    for index, line in enumerate(_list(metadata, "tokenizer.ggml.merges", str)):
        left, _, right = line.partition(" ")
        first, second = vocabulary.get(left), vocabulary.get(right)
        if first is None or second is None or left + right not in vocabulary:
            raise ModelFileError(
                f"tokenizer.ggml.merges[{index}] is {line!r}; it must be two tokens of the vocabulary, separated by a "
                "space, that form a third"
            )
        merges.append((tokens[first], tokens[second]))  # not copies of them, which take 100 bytes a merge
    return merges


def _add_ends(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], metadata: Mapping[str, GgufValue]) -> None:
    """Set the tokens before and after an encoded text: BOS and EOS, if the file or its kind requires them."""
    ids = {name: gguf_token_id(metadata, name) for name in ("bos", "eos")}
    kind = metadata["tokenizer.ggml.model"]
    adds_bos = kind in SENTENCEPIECE_KINDS or (
        kind == "gpt2" and _pre_tokenizer(metadata).adds_bos and ids["bos"] is not None
    )
    ends: dict[str, tuple[str, int]] = {}
    adds_eos = kind == "t5"
    for name, default in (("bos", adds_bos), ("eos", adds_eos)):
        if not _flag(metadata, f"tokenizer.ggml.add_{name}_token", default=default):
            continue
        token_id = ids[name]
        if token_id is None:
            raise ModelFileError(f"{name.upper()} is to be added but tokenizer.ggml.{name}_token_id is missing")
        ends[name] = tokens[token_id], token_id
    if ends:
        before, after = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[*ends.values()]
        )


def _flag(metadata: Mapping[str, GgufValue], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{key} must be true or false, got {value!r:.80}")
    return value


def _per_token(
    metadata: Mapping[str, GgufValue],
    key: str,
    item: type[_Item],
    tokens: Sequence[str],
    default: _Item | None = None,
) -> list[_Item]:
    """Return a list with an entry for each token; `default` for all if the file has none."""
    if key not in metadata and default is not None:
        return [default] * len(tokens)
    values = _list(metadata, key, item)
    if len(values) != len(tokens):
        raise ModelFileError(f"{key} has {len(values)} entries for {len(tokens)} tokens")
    return values


def _list(metadata: Mapping[str, GgufValue], key: str, item: type[_Item]) -> list[_Item]:
    values = metadata.get(key)
    if isinstance(values, GgufStrings):
        values = list(values)
    if not isinstance(values, list):
        raise ModelFileError(
            f"the GGUF file's tokenizer is incomplete: {key} must be a list, got {type(values).__name__}"
        )
    if not all(issubclass(kind, item) for kind in set(map(type, values))):
        raise ModelFileError(f"{key} must hold only {item.__name__} values")
    return cast("list[_Item]", values)


# SentencePiece vocabularies of GGUF files ("llama": Llama 2, Mistral, Gemma), as a `tokenizers.Tokenizer`.
#
# SentencePiece writes spaces as ▁ and begins with single characters. It repeatedly merges the two neighbours whose
# union is the token with the best score, the leftmost of equals. A character that is not a token becomes its UTF-8
# bytes, one token <0xNN> each. The library merges by rank instead. So every way to cut a token into two tokens is a
# merge here, ranked by the token's score. The two methods can differ only if two ways to write one token overlap in the
# text: "aaaa" is both "a" + "aaa" and "aaa" + "a", and of "a", "aaa", "a" the library merges the better ranked
# pair, not the left one. A file made from a tokenizer.json lists its merges and has no meaningful scores; then the
# merges are used.


_SPACE = "▁"
#: Types of tokens that no merge makes: 2 unknown, 3 control, 6 byte.
_RESERVED = (2, 3, 6)


def build_sentencepiece(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unknown: int | None,
    add_space_prefix: bool,
) -> tokenizers.Tokenizer:
    """Return the tokenizer of these tokens (token -> id, ids without gaps) and merges, the first ranked best.

    unknown: id of the token for text that has no bytes either. add_space_prefix: each piece of text between special
    tokens begins as if after a space (llama.cpp and Llama 2's own tokenizer.json do this); decoding removes that space.
    """
    names = list(vocabulary)
    model = models.BPE(
        vocab=dict(vocabulary),
        merges=list(merges),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else names[unknown],
    )
    tokenizer = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if add_space_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return tokenizer


def merges_of_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return every split of a token into two tokens: best score first, smaller id first among equals.

    scores, types: by id.
    """
    parts = {token: index for token, index in vocabulary.items() if types[index] not in _RESERVED}
    merges = []
    for token in sorted(parts, key=lambda token: (-scores[parts[token]], parts[token])):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in parts and right in parts]
    return merges


# Unigram vocabularies of GGUF files, of kind "t5" (XLM-R: bge-m3, multilingual-e5), as a `tokenizers.Tokenizer`.
#
# SentencePiece's unigram model (Kudo 2018, arXiv 1804.10959) divides a text into the tokens with the largest sum of
# scores; text that no token covers is the unknown token. Before that, the file's table, if there is one, replaces
# characters, and spaces become ▁: one before each word, however many there were, as in XLM-R's tokenizer.json.


def build_unigram(
    tokens: Sequence[str], scores: Sequence[float], unknown: int | None, characters: Sequence[int]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of these tokens with their scores, both by id.

    unknown: id of the token for text without tokens. characters: the bytes of SentencePiece's table of replacements;
    none = characters are kept. Errors: ModelFileError.
    """
    if unknown is None:
        raise ModelFileError(
            "the GGUF file's vocabulary has no unknown token: tokenizer.ggml.unknown_token_id is missing"
        )
    model = models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown, byte_fallback=False)
    tokenizer = tokenizers.Tokenizer(model)
    if characters:
        tokenizer.normalizer = _replacements(characters)
    words = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme="always")
    return tokenizer


def _replacements(characters: Sequence[int]) -> normalizers.Normalizer:
    try:
        return normalizers.Precompiled(bytes(characters))
    except Exception as error:  # the library raises Exception itself
        raise ModelFileError(f"tokenizer.ggml.precompiled_charsmap is not a table of replacements: {error}") from None
