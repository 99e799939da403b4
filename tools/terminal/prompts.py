"""The prompts of `engine-core generate`: the user's, or the built-in ones; and chats with images, also for `embed`."""

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ipc.errors import InvalidRequestError

#: Several demo prompts share it, so its KV blocks are computed only once.
DEMO_SYSTEM = (
    "You are a friendly and careful teacher. You answer in plain English, in a few short sentences, with one concrete "
    "example taken from everyday life. You never use lists, headings or tables, and you never repeat the question."
)
DEMO_QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "What is a prime number?",
    "Why do cats purr?",
)
DEMO_ALONE = "Write a short poem about a lighthouse in winter."
#: With greedy sampling a model as small as the demo's soon repeats itself. With the seed, all runs of the demo are
#: equal.
DEMO_SAMPLING: dict[str, float | int] = {"temperature": 0.6, "top_p": 0.9, "seed": 2}

#: For an engine without a tokenizer.
DEMO_IDS_PREFIX = tuple(range(100, 164))


class Question(NamedTuple):
    """One request.

    `chat` is a conversation, `token_ids` a prompt for an engine without a tokenizer, otherwise `text`.
    """

    title: str
    text: str = ""
    chat: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


def add_chat_options(parser: argparse.ArgumentParser, system: str, image: str) -> None:
    """Add the flags of what is around a prompt: --system and --image. system, image: their help."""
    parser.add_argument("--system", metavar="TEXT", help=system)
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=f"{image}; may be repeated")


def read_piped_prompt(prompts: list[str]) -> None:
    """If there is no prompt, add standard input as one: `echo Why? | engine-core generate`.

    Only a pipe or a file is read: other kinds of input are not meant as a prompt.
    """
    if prompts or sys.stdin is None:
        return
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a file
        return
    if (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)) and (text := sys.stdin.read().strip()):
        prompts.append(text)


def read_questions(
    prompts: Sequence[str],
    *,
    system: str | None,
    raw: bool,
    has_tokenizer: bool,
    has_chat_template: bool,
    images: Sequence[str] = (),
) -> list[Question]:
    """Return the requests to make. prompts: empty = the demo's; "-" = read one from standard input. images: files.

    Errors: InvalidRequestError for text if the engine has no tokenizer, and for a system text or an image without a
    chat.
    """
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if not has_tokenizer:
        return [_token_question(text) for text in texts] or _demo_token_questions()
    chat = has_chat_template and not raw
    if system is not None and not chat:
        raise InvalidRequestError("--system needs a chat: this model has no chat template, or --raw was given")
    if images and not (chat and texts):
        raise InvalidRequestError(
            "--image needs a PROMPT and a chat: it works neither with --raw nor with a model without a chat template"
        )
    if not chat:
        return [Question(text, text) for text in texts or [*DEMO_QUESTIONS, DEMO_ALONE]]
    if texts:
        return [_chat_question(text, system, images) for text in texts]
    asked = [_chat_question(text, DEMO_SYSTEM if system is None else system) for text in DEMO_QUESTIONS]
    return [*asked, _chat_question(DEMO_ALONE, system)]


def chat_of(text: str | None, system: str | None, images: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the messages that ask this. text: None = the images alone. images: files, which come before the text."""
    parts = [{"type": "image", "image": file} for file in images]
    content: Any = [*parts, *([] if text is None else [{"type": "text", "text": text}])] if images else text
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _chat_question(text: str, system: str | None, images: Sequence[str] = ()) -> Question:
    return Question(text, chat=chat_of(text, system, images))


def _token_question(text: str) -> Question:
    words = text.split()
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise InvalidRequestError(
            f"this engine has no tokenizer: give prompts as token ids, such as '12 7 300'; got {text!r:.80}"
        )
    return Question(text, token_ids=[int(word) for word in words])


def _demo_token_questions() -> list[Question]:
    prompts = [[*DEMO_IDS_PREFIX, 200 + index] for index in range(len(DEMO_QUESTIONS))]
    return [Question(f"{len(prompt)} token ids", token_ids=prompt) for prompt in prompts]
