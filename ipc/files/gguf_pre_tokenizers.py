"""PRE_TOKENIZERS: how text is split before the merges of byte-level BPE, by the name that a GGUF file has for it.

Names (tokenizer.ggml.pre) are llama.cpp's. Splits and normalizers are those of the tokenizer.json that the models were
published with, because their merges were learned on text split that way.
"""

from typing import Any, NamedTuple

import tokenizers
from tokenizers import pre_tokenizers


class PreTokenizer(NamedTuple):
    """One way of splitting. Without `splits`, words are those of GPT-2."""

    splits: tuple[str, ...] = ()  # expressions whose matches are words, one after the other
    has_digits: bool = False  # each digit is a word
    is_nfc: bool = False  # text is normalized to NFC
    #: A word of the vocabulary is a token, whether or not the merges reach it.
    ignores_merges: bool = False
    adds_bos: bool = False  # where the file does not say whether

    def build(self) -> Any:
        """Return the pre-tokenizer of the tokenizers library."""
        steps: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(each), behavior="isolated") for each in self.splits]
        steps += [pre_tokenizers.Digits(individual_digits=True)] if self.has_digits else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits)
        return pre_tokenizers.Sequence([*steps, last]) if steps else last


#: Llama 3's expression, for any number of digits that go together.
_BY_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: o200k's: a word begins with capitals and goes on with small letters, and takes an 's with it.
_BY_CASE = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS, _ONE_DIGIT = _BY_DIGITS.format(digits="{1,3}"), _BY_DIGITS.format(digits="")
#: Qwen 3.5's: marks belong to letters.
_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Seed's: line ends are words of their own.
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Ideographs and what DeepSeek's first vocabularies put with them.
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
