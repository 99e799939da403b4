"""prompt_context: the last tokens of a prompt, without which the text of the next tokens is not known.

Most tokenizers write a token differently at the beginning of a text than within one: SentencePiece and Metaspace
leave out the space of the first word there, WordPiece puts none before it. An output begins within a text.
"""

from collections.abc import Sequence
from itertools import takewhile

from frontend.tokenizer import Tokenizer, is_byte_token

#: Tokens decoded again so that the ones behind them are decoded in their context; also WindowStream's.
CONTEXT_TOKENS = 6
#: Bytes an unfinished UTF-8 character can have.
_UNFINISHED_BYTES = 3


def prompt_context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the last tokens of the prompt that add something to its text, as many as the output's text depends on.

    Byte-level vocabularies: the tokens of the last three bytes, in which a character may have begun. Others: the last
    CONTEXT_TOKENS, and the whole of the run of byte-fallback tokens in which the first of them stands, since such a
    run is decoded as a whole. Special tokens that are skipped are not among them.
    """
    table = tokenizer.token_table(skip_special_tokens)
    context: list[int] = []
    num_bytes = 0
    for token_id in reversed(prompt_token_ids):
        token = table[token_id]
        if not token:
            continue
        context.append(token_id)
        num_bytes += len(token)
        if tokenizer.is_byte_level:
            if num_bytes >= _UNFINISHED_BYTES:
                break
        elif len(context) >= CONTEXT_TOKENS and not (tokenizer.has_byte_fallback and is_byte_token(token)):
            break
    return context[::-1]


def text_behind(context: str, text: str) -> str:
    """Return the rest of `text`, which begins with `context`. A context that ended within a character has U+FFFD for
    it; where `text` has the character instead, the rest begins with the character."""
    if text.startswith(context):
        return text[len(context) :]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(context, text, strict=False))
    return text[sum(1 for _ in same) :]
