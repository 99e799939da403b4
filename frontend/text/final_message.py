"""continue_final_message: a prompt that ends with the text of the last message, so that the output continues it.

A chat template puts the end of a turn after each message. So a mark is added after the text of the last message, and
the prompt is cut at the mark. This is the method of transformers 5.24: the template gets the text, so its processing
(trimming, separating reasoning) is in the prompt.
"""

from typing import Any

from ipc.errors import InvalidRequestError

_MARK = "\ue0f0\ue0f1continued here\ue0f1\ue0f0"  # from the private use area: no template or tokenizer contains it
_END = " "  # after the mark: a template that trims removes it


def mark_final_text(messages: Any, *, add_generation_prompt: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with the mark after the last one's text, and that text: for content parts, the last text.

    Errors: InvalidRequestError.
    """
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot be combined: a prompt continues the last "
            "message or begins a new one; set add_generation_prompt to False"
        )
    last = messages[-1] if isinstance(messages, (list, tuple)) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _MARK + _END}], content  # type: ignore[dict-item]
    parts = list(content) if isinstance(content, (list, tuple)) else []
    for at in reversed(range(len(parts))):
        text = parts[at].get("text") if isinstance(parts[at], dict) else parts[at]
        if isinstance(text, str):
            marked = text + _MARK + _END
            parts[at] = {**parts[at], "text": marked} if isinstance(parts[at], dict) else marked
            return [*messages[:-1], {**last, "content": parts}], text  # type: ignore[dict-item]
    raise InvalidRequestError(
        "continue_final_message needs a last message whose content is a str or has a part that is text; the last "
        f"message is {last!r:.80}"
    )


def cut_at_mark(prompt: str, text: str) -> str:
    """Return the prompt up to the mark, without the spaces before it if the template trims.

    Errors: InvalidRequestError for a template that does not show the whole text.
    """
    at = prompt.rfind(_MARK)
    if at < 0 or text.strip() not in prompt[:at]:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content unchanged: templates "
            "of reasoning models may leave reasoning out"
        )
    trims = not prompt.startswith(_END, at + len(_MARK))
    return prompt[:at].rstrip() if trims else prompt[:at]
