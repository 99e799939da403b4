"""The forms in which a caller may write a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict


class TextPrompt(TypedDict, total=False):
    """A prompt written as text."""

    prompt: str
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt whose tokens are given by their embeddings."""

    prompt_embeds: Any  # [tokens, hidden], an array or a tensor of floats
    cache_salt: str


class ImagePrompt(TypedDict, total=False):
    """A prompt written as text, with images in it."""

    prompt: str  # with the model's mark, such as <image>, for each image
    multi_modal_data: Mapping[str, Any]  # {"image": one image, or a list of them}
    image_marks: Sequence[int]  # indices of the marks that are images, from 0; the others are text; absent = all
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt written as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str  # their original text, for the output only
    cache_salt: str
    second_from: int  # where the second of two texts begins, for encoders that distinguish them; 0 = one text


PromptInput: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ImagePrompt
