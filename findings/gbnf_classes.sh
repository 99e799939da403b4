#!/usr/bin/env bash
# llguidance reads GBNF classes and dots as Rust's regexes, not as llama.cpp does.
#
# `llguidance.gbnf_to_lark` copies a class into a regex. In GBNF a class is a list of characters and ranges; a dot is any
# character. In Rust's syntax `~~` inside a class is an operator (the symmetric difference), so `[a~~b]` does not match
# "~", and a dot does not match a newline.
#
# What follows: classes and dots are to be translated by whoever promises llama.cpp's meaning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" llguidance==1.9.1 tokenizers==0.23.3
cat > "$folder/program.py" <<'PROGRAM'
import json
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
words = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*alphabet, "<end>"])}, []))
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
words.decoder = decoders.ByteLevel()
tokenizer = LLTokenizer(words.to_str(), eos_token=len(alphabet))

def accepts(grammar, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(gbnf_to_lark(grammar)))
    assert not matcher.is_error(), matcher.get_error()
    ids = words.encode(text).ids
    return matcher.validate_tokens(ids) == len(ids)

print("a letter of a class:", accepts("root ::= [a~~b]", "a"))
print("a tilde of a class:", accepts("root ::= [a~~b]", "~"))
print("dot, letter:", accepts("root ::= .", "a"))
print("dot, newline:", accepts("root ::= .", chr(10)))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
a letter of a class: True
a tilde of a class: False
dot, letter: True
dot, newline: False
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" PYTHONWARNINGS=ignore python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
