"""continue_final_message: a prompt that ends with the text of the last message, so that the output goes on with it.

A chat template puts the end of a turn behind each message. So the last message is rendered with a mark in place of its
text, and the prompt is cut at the mark. This is the method of transformers.
"""

from typing import Any

from ipc.errors import InvalidRequestError

_MARK = "\ue0f0\ue0f1continued here\ue0f1\ue0f0"  # of the private use area: no template and no tokenizer has it


def mark_final_text(messages: Any, *, add_generation_prompt: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with the mark in place of the last one's text, and that text. Errors: InvalidRequestError."""
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: a prompt goes on with the last "
            "message or begins a new one; set add_generation_prompt to False"
        )
    last = messages[-1] if isinstance(messages, (list, tuple)) and messages else None
    text = last.get("content") if isinstance(last, dict) else None
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"continue_final_message needs a last message whose content is a str; the last message is {last!r:.80}"
        )
    return [*messages[:-1], {**last, "content": _MARK}], text  # type: ignore[dict-item]


def cut_at_mark(prompt: str, text: str) -> str:
    """Return the prompt up to the mark, and `text` in its place. Errors: InvalidRequestError where it has no mark."""
    at = prompt.rfind(_MARK)
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content as it is"
        )
    return prompt[:at] + text
