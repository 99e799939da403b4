"""prompt_context: the last tokens of a prompt, on which the text of the next tokens depends.

Most tokenizers write a token differently at the beginning of a text than within one. SentencePiece and Metaspace leave
out the space of the first word there; WordPiece puts none before it. An output begins in the middle of a text.
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import takewhile

from frontend.text.tokenizer import Tokenizer, TokenTable
from ipc.files.token_bytes import is_byte_token

#: Number of tokens decoded again so that later ones are decoded in their context; also used by WindowStream.
CONTEXT_TOKENS = 6
#: Most bytes of an unfinished UTF-8 character.
_UNFINISHED_BYTES = 3


def prompt_context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the last tokens of the prompt that add to its text: those on which the output's text depends.

    Byte-level vocabularies: the tokens of the last three bytes, in which a character may have begun. Others: the last
    CONTEXT_TOKENS, and after them the byte-fallback tokens of an unfinished character. Special tokens that are skipped
    are left out.
    """
    table = tokenizer.token_table(skip_special_tokens)
    visible = (token_id for token_id in reversed(prompt_token_ids) if table[token_id])
    if tokenizer.is_byte_level:
        return _last_bytes(visible, table)
    run: list[int] = []  # byte-fallback tokens at the prompt's end, last first
    before: list[int] = []
    for token_id in visible:
        if not before and tokenizer.has_byte_fallback and is_byte_token(table[token_id]):
            run.append(token_id)
            continue
        before.append(token_id)
        if len(before) == CONTEXT_TOKENS:
            break
    return before[::-1] + (_unfinished(run[::-1], tokenizer) if before else run[::-1])


def _last_bytes(visible: Iterable[int], table: TokenTable) -> list[int]:
    context: list[int] = []
    num_bytes = 0
    for token_id in visible:
        context.append(token_id)
        num_bytes += len(table[token_id])
        if num_bytes >= _UNFINISHED_BYTES:
            break
    return context[::-1]


def _unfinished(run: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the byte tokens of the character that the run leaves unfinished, or all of them if they are not UTF-8.

    A run is decoded as a whole: one bad byte makes all of it U+FFFD. Finished characters belong to the prompt and are
    left out, so that a bad byte of the output does not change them.
    """
    data = b"".join(tokenizer.bytes_of(token_id) or b"" for token_id in run)
    try:
        _, used = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return run
    return run[used:]


def text_behind(context: str, text: str) -> str:
    """Return the rest of `text`, which begins with `context`.

    A context that ended in the middle of a character has U+FFFD for it. If `text` has the character instead, the rest
    begins with the character.
    """
    if text.startswith(context):
        return text[len(context) :]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(context, text, strict=False))
    return text[sum(1 for _ in same) :]
