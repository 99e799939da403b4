"""Tokenizer: text to token ids and back, from a model's text files.

It is built from bytes, not from a path, because a client of a remote engine receives these files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import decoders

from frontend.text.chat_template import check_template
from frontend.text.prompt_forms import PromptInput
from frontend.text.text_cuts import TextBound, TextCuts, text_bound, text_cuts
from frontend.text.tokenizer_calls import TokenizerCalls
from ipc.errors import InvalidRequestError, ModelFileError
from ipc.files.gguf import GgufValue, parse_gguf_metadata
from ipc.files.gguf_vocabulary import GGUF_ENDS, build_gguf_tokenizer, gguf_end_ids, gguf_token_id
from ipc.files.model_files import GGUF_HEADER, GIVEN_TEMPLATE
from ipc.files.text_files import TEMPLATE_FOLDER
from ipc.files.token_bytes import byte_level_bytes, is_byte_token
from ipc.files.tokenizer_json import parse_tokenizer_json

# TextPrompts: the instructions that an embedding model expects before its texts, by name, from its own files.


#: Names of prompts for queries, and for documents, in published models; the first that a model has is used.
_QUERY = ("query", "search_query", "retrieval.query", "Retrieval-query")
_DOCUMENT = ("document", "passage", "search_document", "retrieval.passage", "Retrieval-document")


class TextPrompts(NamedTuple):
    """The prompts of a model: texts to put before a text, such as "query: "."""

    by_name: Mapping[str, str] = {}
    default_name: str | None = None  # name of the default one; None: none
    opens_answer: bool = False  # a chat to embed ends with the beginning of an answer

    def before(self, prompts: Sequence[PromptInput], name: str | None) -> list[PromptInput]:
        """Return the prompts with the named instruction before each text; those that are token ids are not changed.

        name: None = the model's default, "" = none. Errors: InvalidRequestError for a name that the model does not
        have.
        """
        instruction = self.named(name)
        return [_after(instruction, prompt) for prompt in prompts] if instruction else list(prompts)

    def before_chat(self, messages: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
        """Return a chat with the named instruction as a system message before the others, as sentence-transformers has
        it; the default one is for a chat that does not begin with a system message. What is no chat is returned as it
        is: read_messages() refuses it. name, errors: as in before().
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            return messages
        first = messages[0]
        if name is None and isinstance(first, Mapping) and first.get("role") == "system":
            return messages
        instruction = self.named(name)
        return [{"role": "system", "content": instruction}, *messages] if instruction else messages

    def named(self, name: str | None) -> str:
        """Return the instruction with this name; "" = none. name, errors: as in before()."""
        chosen = self.default_name if name is None else name
        if not chosen:
            return ""
        if chosen not in self.by_name:
            known = ", ".join(map(repr, self.by_name)) or "none"
            raise InvalidRequestError(f"prompt_name={chosen!r:.80} is not a prompt of this model; it has {known}")
        return self.by_name[chosen]

    def name_for(self, input_type: str) -> str:
        """Return the name of the prompt for queries, or for documents; "" if the model puts nothing before documents.

        input_type: query or document, or passage, search_query or search_document, as other servers call them.
        Errors: InvalidRequestError for another one, and if the model has prompts, but none for queries.
        """
        names = next((names for names in (_QUERY, _DOCUMENT) if input_type in names), None)
        if names is None:
            raise InvalidRequestError(f"input_type must be query or document, got {input_type!r:.80}")
        found = next((name for name in names if name in self.by_name), "")
        if not found and names is _QUERY and self.by_name:
            known = ", ".join(map(repr, self.by_name))
            raise InvalidRequestError(f"this model has no prompt for queries: use prompt_name, it has {known}")
        return found


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


def read_text_prompts(values: Mapping[str, Any], transformer: Mapping[str, Any]) -> TextPrompts:
    """Return the prompts of config_sentence_transformers.json. Errors: ModelFileError.

    transformer: the settings in sentence_bert_config.json, where sentence-transformers has arguments of chat templates.
    """
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelFileError("config_sentence_transformers.json: prompts must be texts by name")
    if default is not None and default not in prompts:
        raise ModelFileError(
            f"config_sentence_transformers.json: default_prompt_name={default!r:.80} is not one of its prompts"
        )
    processing = transformer.get("processing_kwargs")
    of_chats = processing.get("chat_template") if isinstance(processing, dict) else None
    opens = of_chats.get("add_generation_prompt") if isinstance(of_chats, dict) else None
    if not isinstance(opens, bool | None):
        raise ModelFileError(
            f"sentence_bert_config.json: add_generation_prompt of chat_template must be a boolean; got {opens!r:.80}"
        )
    return TextPrompts(prompts, default, bool(opens))


#: Prefix of the GGUF key of a named chat template; tokenizer.chat_template itself is the default one.
_GGUF_TEMPLATE = "tokenizer.chat_template."
#: Of texts that are encoded in one call. It takes up to 350 bytes of memory for each byte of text (digits). A longer
#: text is encoded in parts, where that changes no token.
_CALL_CHARS = 1 << 18
_MANY_IDS = 1024


class TokenTable(dict[int, bytes]):
    """A map from token id to what the token adds to the text. It is filled on first use, so loading has no cost per
    token.

    Byte-level: the token's bytes. Other vocabularies: its name in the vocabulary, UTF-8. b"" = the token adds nothing
    (the id is unknown, or special and skipped). The map never outgrows the vocabulary.
    """

    def __init__(self, hf: tokenizers.Tokenizer, skipped: frozenset[int], *, byte_level: bool) -> None:
        super().__init__()
        self._hf = hf
        self._skipped = skipped
        self._byte_level = byte_level

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._hf.id_to_token(token_id)
        if token is None:
            return b""
        self[token_id] = text = byte_level_bytes(token) if self._byte_level else token.encode()
        return text


class Tokenizer(TokenizerCalls):
    """The text side of one model. frontend/text/tokenizer_calls.py adds the methods that users of transformers call.

    `hf` is the raw tokenizers.Tokenizer. `bos_token_id` and `eos_token_id` are None if the model has none.
    `eos_token_ids` are all ids that end a generation, `eos_token_id` first. `chat_templates` are by name: "default" for
    plain chats, "tool_use" for those with tools. `text_prompts` are an embedding model's instructions before texts.
    """

    def __init__(
        self,
        hf: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        text_prompts: TextPrompts | None = None,
    ) -> None:
        # A tokenizer.json may contain the truncation and padding of its training.
        hf.no_truncation()
        hf.no_padding()
        self.hf = hf
        self.vocab_size = hf.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self.bos_token = None if bos_token_id is None else hf.id_to_token(bos_token_id)
        self.eos_token = None if self.eos_token_id is None else hf.id_to_token(self.eos_token_id)
        self.chat_templates = dict(chat_templates or {})
        self.text_prompts = text_prompts or TextPrompts()
        added = hf.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.is_byte_level = isinstance(hf.decoder, decoders.ByteLevel)
        decoder = hf.decoder.__getstate__() if hf.decoder else b""
        self.has_byte_fallback = b'"ByteFallback"' in decoder
        self._has_byte_names = b'"ByteLevel"' in decoder  # also in a sequence of decoders
        #: Most bytes of a part of a long text without a place to cut it; None = no bound. Set by who reads for others.
        self.most_uncut: int | None = None
        self._tables = {
            skip: TokenTable(hf, self.special_token_ids if skip else frozenset(), byte_level=self.is_byte_level)
            for skip in (True, False)
        }

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """Return the tokenizer of these files (file name -> content; "gguf-header" = a GGUF file's metadata section).

        Errors: ModelFileError naming the missing or corrupt file; UnsupportedModelError for an unsupported kind of GGUF
        vocabulary.
        """
        found = _from_folder(files) if "tokenizer.json" in files else None
        if found is None and GGUF_HEADER in files:
            found = _from_gguf(parse_gguf_metadata(files[GGUF_HEADER]))
        if found is not None:
            if GIVEN_TEMPLATE in files:
                found.chat_templates = {"default": _checked_template(files)}
            return found
        names = ", ".join(sorted(files)) or "no file at all"
        raise ModelFileError(
            f"the model has no tokenizer: tokenizer.json is missing (found {names}); skip_tokenizer_init=True runs it "
            "with token ids"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Use `add_special_tokens=False` for a rendered chat template, which writes its own. Errors: InvalidRequestError
        for a value that is not text.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    @cached_property
    def bound(self) -> TextBound:
        """Return the bound on the fewest tokens that texts can have."""
        return text_bound(self.hf)

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The names of tokens that a text is searched for before it is split into others, the special ones included."""
        return tuple(token.content for token in self.hf.get_added_tokens_decoder().values())

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of two texts, joined by the tokenizer's post-processor, and the index of the first token
        of the second text; 0 = it does not distinguish them. Other threads can run during it. Errors:
        InvalidRequestError.
        """
        for text in (first, second):
            _check_text(text)
        (encoded,) = self.hf.encode_batch_fast([(first, second)])
        return encoded.ids, encoded.type_ids.index(1) if 1 in encoded.type_ids else 0

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text; the texts are encoded in parallel. Errors: InvalidRequestError.

        Other threads can run during it: unlike encode(), this call of the tokenizers library releases Python's lock.
        """
        for text in texts:
            _check_text(text)
        found: list[list[int]] = []
        for part in _calls(texts):
            if len(part) == 1 and len(part[0]) > _CALL_CHARS and self._cuts is not None:
                found.append(self._encode_in_parts(part[0], self._cuts, add_special_tokens))
            else:
                found += self._encode_at_once(part, add_special_tokens)
        return found

    def _encode_at_once(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [one.ids for one in self.hf.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def _encode_in_parts(self, text: str, cuts: TextCuts, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a long text. The special tokens around it are those around a short one."""

        def encode(part: str) -> list[int]:
            return self._encode_at_once([part], False)[0]

        ids: list[int] = []
        for part in cuts.parts_of(text, _CALL_CHARS):
            size = len(part.encode(errors="replace")) if len(part) > _CALL_CHARS else 0
            if self.most_uncut is not None and size > self.most_uncut:
                raise InvalidRequestError(
                    f"the text has {size} bytes in a row without a space between two words; at most "
                    f"{self.most_uncut} are read in one piece"
                )
            ids += encode(part)
        if not add_special_tokens:
            return ids
        bare, whole = encode("a"), self._encode_at_once(["a"], True)[0]
        first = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:first] + ids + whole[first + len(bare) :]

    @cached_property
    def _cuts(self) -> TextCuts | None:
        return text_cuts(self.hf)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of these ids, or of one. Ids that the vocabulary does not have add nothing."""
        if not isinstance(ids, int) and len(ids) > _MANY_IDS:  # decode() holds Python's lock, decode_batch() does not
            return self.hf.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return self.hf.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids, special ones included. Bytes that are not a complete character
        become U+FFFD.
        """
        return self.hf.decode_batch(sequences, skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None for a token of text and for an id outside the vocabulary."""
        token = self.hf.id_to_token(token_id)
        if token is None:
            return None
        if self._has_byte_names:
            return byte_level_bytes(token)
        return bytes.fromhex(token[3:5]) if self.has_byte_fallback and is_byte_token(token.encode()) else None

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of all tokens that are not text, by name: special ones, and those that end a generation."""
        ids = {*self.special_token_ids, *self.eos_token_ids}
        return {name: token for token in sorted(ids) if (name := self.hf.id_to_token(token)) is not None}

    def token_table(self, skip_special_tokens: bool) -> TokenTable:
        """Return the table of what each token adds to the text."""
        return self._tables[skip_special_tokens]


def _from_gguf(metadata: Mapping[str, GgufValue]) -> Tokenizer:
    hf = build_gguf_tokenizer(metadata)
    template = metadata.get("tokenizer.chat_template")
    named = {"default": template} | {
        key.removeprefix(_GGUF_TEMPLATE): value for key, value in metadata.items() if key.startswith(_GGUF_TEMPLATE)
    }
    ends = [gguf_token_id(metadata, name) for name in GGUF_ENDS] + gguf_end_ids(metadata)
    return Tokenizer(
        hf,
        bos_token_id=gguf_token_id(metadata, "bos"),
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        chat_templates={name: text for name, text in named.items() if isinstance(text, str)},
    )


def _from_folder(files: Mapping[str, bytes]) -> Tokenizer:
    hf = parse_tokenizer_json(files["tokenizer.json"])
    config = _read_object(files, "tokenizer_config.json")
    names = _read_object(files, "special_tokens_map.json")
    generation = _read_object(files, "generation_config.json")
    model = _read_object(files, "config.json")

    def token_ids(name: str) -> list[int]:
        """Return the ids that the files give this token, the tokenizer's own first.

        config.json counts only if no other file has one.
        """
        texts = [_token_text(source.get(f"{name}_token")) for source in (config, names)]
        ids: list[object] = [hf.token_to_id(text) for text in texts if text]
        ids += _as_list(generation.get(f"{name}_token_id"))
        ids = [token_id for token_id in ids if token_id is not None] or _as_list(model.get(f"{name}_token_id"))
        return [token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < hf.get_vocab_size()]

    return Tokenizer(
        hf,
        bos_token_id=next(iter(token_ids("bos")), None),
        eos_token_ids=token_ids("eos"),
        chat_templates=_chat_templates(files, config),
        text_prompts=read_text_prompts(
            _read_object(files, "config_sentence_transformers.json"), _read_object(files, "sentence_bert_config.json")
        ),
    )


def _read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = msgspec.json.decode(files[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{name} must contain a JSON object, got {type(value).__name__}")
    return value


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _token_text(value: object) -> str | None:
    """Return the text of a special token, which is written as a string or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name. Separate files override those of tokenizer_config.json; chat_template.json, of
    older processors, is read if nothing else has a default one.
    """
    given = config.get("chat_template")
    named: dict[object, object] = {"default": given}
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    for name in files:
        if name == "chat_template.jinja":
            named["default"] = _read_template(files, name)
        elif name.startswith(f"{TEMPLATE_FOLDER}/"):
            named[name.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja")] = _read_template(files, name)
    if named.get("default") is None:
        named["default"] = _read_object(files, "chat_template.json").get("chat_template")
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _checked_template(files: Mapping[str, bytes]) -> str:
    """Return the given template. Errors: ModelFileError if it is not UTF-8."""
    text = _read_template(files, GIVEN_TEMPLATE)
    try:
        check_template(text)
    except InvalidRequestError as error:
        raise ModelFileError(f"{GIVEN_TEMPLATE}: {error}") from None
    return text


def _read_template(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{name} is not UTF-8: {error}") from error


def _calls(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in parts of about _CALL_CHARS, or one text if that is longer."""
    part, size = list[str](), 0
    for text in texts:
        if part and size + len(text) > _CALL_CHARS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"a prompt must be a str (or token ids), got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"a prompt must be valid Unicode: {error}") from error
