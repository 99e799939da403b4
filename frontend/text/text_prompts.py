"""TextPrompts: the instructions that an embedding model expects before its texts, by name, from its own files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from frontend.text.prompt_forms import PromptInput
from ipc.errors import InvalidRequestError, ModelFileError


class TextPrompts(NamedTuple):
    """The prompts of a model: texts to put before a text, such as "query: "."""

    by_name: Mapping[str, str] = {}
    default_name: str | None = None  # name of the default one; None: none

    def before(self, prompts: Sequence[PromptInput], name: str | None) -> list[PromptInput]:
        """Return the prompts with the named instruction before each text; those that are token ids are not changed.

        name: None = the model's default, "" = none. Errors: InvalidRequestError for a name that the model does not
        have.
        """
        chosen = self.default_name if name is None else name
        if not chosen:
            return list(prompts)
        if chosen not in self.by_name:
            known = ", ".join(map(repr, self.by_name)) or "none"
            raise InvalidRequestError(f"prompt_name={chosen!r:.80} is not a prompt of this model; it has {known}")
        return [_after(self.by_name[chosen], prompt) for prompt in prompts]


def _after(instruction: str, prompt: PromptInput) -> PromptInput:
    if isinstance(prompt, str):
        return instruction + prompt
    if (
        isinstance(prompt, Mapping)
        and isinstance(text := prompt.get("prompt"), str)
        and "prompt_token_ids" not in prompt
    ):
        return {**prompt, "prompt": instruction + text}  # type: ignore[return-value]
    return prompt


def read_text_prompts(values: Mapping[str, Any]) -> TextPrompts:
    """Return the prompts of config_sentence_transformers.json. Errors: ModelFileError."""
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelFileError("config_sentence_transformers.json: prompts must be texts by name")
    if default is not None and default not in prompts:
        raise ModelFileError(
            f"config_sentence_transformers.json: default_prompt_name={default!r:.80} is not one of its prompts"
        )
    return TextPrompts(prompts, default)
