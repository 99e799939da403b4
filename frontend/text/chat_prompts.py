"""render_prompts: chats as prompts, rendered by a chat template, with their images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frontend.images.chat_images import take_images
from frontend.images.written_marks import hide_marks, reveal_marks
from frontend.text.chat_template import render_chat
from frontend.text.prompt_forms import PromptInput
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError


def render_prompts(
    tokenizer: Tokenizer | None,
    conversations: Sequence[list[dict[str, Any]]],
    *,
    template: str | None,
    image_mark: str | None,
    takes_files: bool,
    arguments: Mapping[str, Any],
    render: Callable[..., str] = render_chat,
) -> list[PromptInput]:
    """Return the prompt of each conversation: a str, or an ImagePrompt for one with images.

    template: None = the model's, a name = the model's template of this name, otherwise a template's text. image_mark:
    of the model's prompts, None = it takes no images. takes_files: whether images may be files of this machine.
    arguments: further ones of render_chat(). render: used instead of render_chat(). Errors: InvalidRequestError.
    """
    if tokenizer is None:
        raise InvalidRequestError("this engine has no tokenizer, so no chat template: use generate() with token ids")
    if template is not None and not isinstance(template, str):
        raise InvalidRequestError(f"chat_template must be a str, got {type(template).__name__}")
    source = tokenizer.choose_chat_template(template, with_tools=bool(arguments["tools"]))
    rendered: list[PromptInput] = []
    for messages in conversations:
        images: list[Any] = []
        variables = dict(arguments)
        if image_mark is not None:
            messages, images = take_images(messages, takes_files=takes_files)
            if images:
                messages, variables = hide_marks(messages, image_mark), hide_marks(variables, image_mark)
        prompt = render(
            source,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            image_mark=image_mark,
            **variables,
        )
        if image_mark is not None and images:
            text, marks = reveal_marks(prompt, image_mark)
            rendered.append({"prompt": text, "multi_modal_data": {"image": images}, "image_marks": marks})
        else:
            rendered.append(prompt)
    return rendered
