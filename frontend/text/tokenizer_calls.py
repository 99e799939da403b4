"""TokenizerCalls: methods that programs for transformers' tokenizers call, under transformers' names."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from frontend.text.chat_template import render_chat
from ipc.errors import InvalidRequestError


class BatchEncoding(dict[str, Any]):
    """Token ids and attention masks by name, also as attributes, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


#: Options of transformers' apply_chat_template() that are no variables of a template.
_OPTIONS = (
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_tensors",
    "tokenizer_kwargs",
    "truncation",
)


def _check_unasked(options: Mapping[str, object]) -> None:
    """Check that these options of transformers ask for nothing. Errors: InvalidRequestError."""
    if asked := [name for name, value in options.items() if value not in (None, False)]:
        raise InvalidRequestError(f"this tokenizer has no {', '.join(asked)}: it returns all ids, unpadded, as lists")


class TokenizerCalls:
    """A part of Tokenizer. Attributes are also transformers': padding is never done, so the side is only stored."""

    hf: tokenizers.Tokenizer
    chat_templates: dict[str, str]
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None
    special_token_ids: frozenset[int]
    name_or_path = ""
    is_fast = True
    padding_side = "right"
    truncation_side = "right"

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: object) -> BatchEncoding:
        """Return input_ids of a text, or of each of several, and attention_mask unless return_attention_mask is False.

        Errors: InvalidRequestError for an option of transformers that would change the ids (truncation, padding).
        """
        return_mask = options.pop("return_attention_mask", True)
        _check_unasked(options)
        texts = [text] if isinstance(text, str) else list(text)
        many = [one.ids for one in self.hf.encode_batch(texts, add_special_tokens=add_special_tokens)]
        fields: dict[str, Any] = {"input_ids": many}
        if return_mask:
            fields["attention_mask"] = [[1] * len(ids) for ids in many]
        return BatchEncoding(fields if not isinstance(text, str) else {name: one[0] for name, one in fields.items()})

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> str | list[int] | BatchEncoding:
        """Return the prompt of a conversation: its token ids, or with tokenize=False its text.

        return_dict: the ids with an attention mask, as of a text. kwargs: variables of the template.
        Errors: InvalidRequestError, also for an option of transformers that would change the ids.
        """
        _check_unasked({name: kwargs.pop(name) for name in list(kwargs) if name in _OPTIONS})
        text = render_chat(
            self.choose_chat_template(chat_template, with_tools=bool(tools)),
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            tools=tools,
            **kwargs,
        )
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded.input_ids

    @property
    def chat_template(self) -> str | None:
        """Return the default chat template; None if the model has none. It can be set."""
        return self.chat_templates.get("default")

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        """Set the default chat template."""
        self.chat_templates["default"] = template

    def choose_chat_template(self, given: str | None, *, with_tools: bool) -> str | None:
        """Return the chat template to use.

        `given` is a template or the name of one. None means the model's own: the one for tools if the chat has tools
        and the model has one, otherwise the default.
        """
        if given is not None:
            return self.chat_templates.get(given, given)
        return (self.chat_templates.get("tool_use") if with_tools else None) or self.chat_template

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, including added tokens."""
        return self.hf.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.hf.get_vocab_size(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each of several; None if it is not a token."""
        if isinstance(tokens, str):
            return self.hf.token_to_id(tokens)
        return [self.hf.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id, or of each of several, as in the vocabulary; None for an unknown id."""
        if isinstance(ids, int):
            return self.hf.id_to_token(ids)
        return [self.hf.id_to_token(one) for one in ids]

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text, without special ones."""
        return self.hf.encode(text, add_special_tokens=False).tokens

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of ids."""
        return self.hf.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        """Return the ids of all special tokens."""
        return sorted(self.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Return all special tokens."""
        return [token for one in self.all_special_ids if (token := self.hf.id_to_token(one)) is not None]

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Return the special tokens by their part: bos_token and eos_token, if the model has them."""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: token for name, token in named.items() if token is not None}
