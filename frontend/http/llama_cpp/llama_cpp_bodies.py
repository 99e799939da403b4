"""The bodies of llama.cpp's own routes, and their fields as ours: each is obeyed, without an effect, or refused."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from frontend.http.bodies import CompletionBody, Json, SamplingFields
from frontend.http.errors import HttpError
from frontend.text.tokenizer import Tokenizer
from ipc.params.json_schemas import close_objects
from ipc.params.sampling_params import NUMBERS

#: Names of the number of tokens to predict, where -1 and -2 mean "as many as fit".
_LIMITS = ("max_tokens", *NUMBERS["max_tokens"].parameter.names)
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
#: llama.cpp's samplers in its order, which is ours -> the values with which each does nothing. "dry" is not here.
_SAMPLERS: dict[str, Json] = {
    "penalties": _PENALTIES,
    "dry": {},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}


class LlamaCppBody(SamplingFields, kw_only=True):
    """The body of /completion: what all completions have, and fields of llama.cpp's that are obeyed here alone."""

    prompt: Any = None
    logit_bias: Any = None  # also pairs of a token or a text and a number, or false = never
    n_cmpl: int | None = None  # n
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: Any = None
    samplers: list[str] | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None

    # Accepted, and without an effect: the rest belongs to what is refused.
    backend_sampling: Any = None
    preserved_tokens: Any = None

    # Refused by name, in addition to what all completions refuse.
    image_data: Any = None
    system_prompt: Any = None
    grammar_lazy: Any = None
    grammar_triggers: Any = None


#: Fields that other completions refuse and these obey.
_OBEYED = (
    *("n_probs", "grammar", "json_schema", "samplers", "cache_prompt", "return_tokens", "timings_per_token"),
    "response_fields",
)


class InfillBody(LlamaCppBody, kw_only=True):
    """The body of /infill. prompt: what follows the prefix, before the cursor."""

    input_prefix: str
    input_suffix: str
    input_extra: list[Json] | None = None


#: Field -> (values that ask for nothing, what to do instead). None asks for nothing.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "image_data": (([],), "send images to /v1/chat/completions"),
    "system_prompt": (("", {}), "write it into the prompt"),
    "grammar_lazy": ((False,), "use tools of /v1/chat/completions"),
    "grammar_triggers": (([],), "use tools of /v1/chat/completions"),
    "return_token_ids": ((False,), "use return_tokens"),
    "return_tokens_as_token_ids": ((False,), "n_probs shows ids"),
    "prompt_logprobs": ((), "use /v1/completions"),
    "stream_options": ((), "the last event of a stream has the counts"),
}


def completion_of(body: LlamaCppBody, tokenizer: Tokenizer | None) -> tuple[CompletionBody, bool]:
    """Return the completion that a body asks for, and whether it wants no tokens. Its prompt is left out.

    Errors: HttpError 400 that names the field.
    """
    for name, (neutral, instead) in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise HttpError(400, f"{name} is not supported: {instead}", param=name)
    fields: Json = {name: getattr(body, name) for name in SamplingFields.__struct_fields__ if name not in _OBEYED}
    limit = next((fields[name] for name in _LIMITS if fields[name] is not None), None)
    fields |= dict.fromkeys(_LIMITS)
    fields["max_tokens"] = None if limit in (-1, -2) else 1 if limit == 0 else limit  # one token at least is made
    fields["n"] = body.n_cmpl if fields["n"] is None else fields["n"]
    fields["logit_bias"] = _biases(body.logit_bias, tokenizer)
    fields |= _off(body.samplers)
    if body.cache_prompt is False:
        fields["cache_salt"] = secrets.token_hex(16)
    if (structure := _structure(body)) is not None:
        fields["structured_outputs"] = structure
    return CompletionBody(**fields), limit == 0


def _structure(body: LlamaCppBody) -> Json | None:
    if body.grammar and body.json_schema is not None:
        raise HttpError(400, "grammar and json_schema exclude each other", param="grammar")
    if body.grammar:
        return {"grammar": body.grammar}
    if body.json_schema is None:
        return None
    if not isinstance(body.json_schema, (dict, bool)):
        raise HttpError(400, "json_schema must be a JSON schema, an object", param="json_schema")
    # As in llama.cpp, no further properties are written than those that the schema names.
    return {"json": close_objects(body.json_schema) if isinstance(body.json_schema, dict) else {}}


def _off(samplers: Sequence[str] | None) -> Json:
    """Return the fields that turn off the samplers which a list leaves out. Errors: HttpError 400 for another order."""
    if samplers is None:
        return {}
    names = [one.replace("-", "_") for one in samplers]
    names = ["typ_p" if one in ("typical", "typical_p") else one for one in names]
    if names != [one for one in _SAMPLERS if one in names]:
        text = f"samplers must be some of {', '.join(_SAMPLERS)}, in this order; got {samplers!r:.200}"
        raise HttpError(400, text, param="samplers")
    off = (fields for name, fields in _SAMPLERS.items() if name not in names)
    return {name: value for fields in off for name, value in fields.items()}


def _biases(given: Any, tokenizer: Tokenizer | None) -> dict[str, float] | None:
    """Return logit_bias by token id. A text stands for each of its tokens; false is the lowest bias there is."""
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(one, (list, tuple)) and len(one) == 2 for one in pairs):
        text = "logit_bias must be an object, or a list of pairs of a token or a text and a number or false"
        raise HttpError(400, text, param="logit_bias")
    found: dict[str, float] = {}
    for token, bias in pairs:
        number = -100.0 if bias is False else bias
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise HttpError(400, f"a bias is a number, or false; got {bias!r:.40}", param="logit_bias")
        found |= dict.fromkeys(_tokens_of(token, tokenizer), float(number))
    return found


def _tokens_of(token: Any, tokenizer: Tokenizer | None) -> list[str]:
    if isinstance(token, int) and not isinstance(token, bool):
        return [str(token)]
    if not isinstance(token, str):
        raise HttpError(400, f"logit_bias is of token ids or texts; got {token!r:.40}", param="logit_bias")
    if token.isdecimal():
        return [token]
    if tokenizer is None:
        raise HttpError(400, "logit_bias of a text needs a tokenizer, which this engine has not", param="logit_bias")
    return [str(one) for one in tokenizer.encode(token, add_special_tokens=False)]


def split(prompt: Any) -> list[Any]:
    """Return the prompts of a body: a list with a number in it is one, of tokens and texts.

    Errors: HttpError 400.
    """
    if prompt is None or prompt in ("", []):
        raise HttpError(400, "prompt is missing: send a text, token ids, or a list of these", param="prompt")
    has_ids = isinstance(prompt, list) and any(isinstance(one, (int, float)) for one in prompt)
    return [prompt] if has_ids or not isinstance(prompt, list) else prompt


def read_prompt(prompt: Any, encode: Callable[[str, bool], list[int]]) -> str | list[int]:
    """Return one prompt as the engine takes it: a text, or token ids.

    encode: makes token ids of a text, with special tokens around it or not. Errors: HttpError 400.
    """
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        if prompt.get("multimodal_data"):
            raise HttpError(400, "multimodal_data is not supported: use /v1/chat/completions", param="prompt")
        return str(prompt["prompt_string"])
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise HttpError(
            400, f"a prompt is a text, or a list of token ids and texts; got {prompt!r:.40}", param="prompt"
        )
    ids: list[int] = []
    for place, part in enumerate(prompt):
        if isinstance(part, str):
            ids += encode(part, place == 0)
        elif isinstance(part, float) and part.is_integer():
            ids.append(int(part))
        else:
            ids.append(part)  # what is no token is refused with the prompt
    return ids


#: Names of the tokens of filling in: what begins the code before the gap, the code behind it, and the answer; what
#: begins a repository, and a file of it. Of each model the first that it has counts.
_FIM_NAMES = (
    ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<\uff5cfim▁begin\uff5c>", "<|code_prefix|>", "<PRE>", "▁<PRE>"),
    ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<\uff5cfim▁hole\uff5c>", "<|code_suffix|>", "<SUF>", "▁<SUF>"),
    ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<\uff5cfim▁end\uff5c>", "<|code_middle|>", "<MID>", "▁<MID>"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
_SNIPPET = "\n\n--- snippet ---\n\n"


def infill_prompt(body: InfillBody, tokenizer: Tokenizer, encode: Callable[[str, bool], list[int]]) -> list[int]:
    """Return the prompt that asks for what is between prefix and suffix, in llama.cpp's form.

    encode: as read_prompt() has it. Errors: HttpError 501 if the model has no tokens for it.
    """
    prefix, suffix, middle, repository, file = (
        next((found for name in names if (found := tokenizer.hf.token_to_id(name)) is not None), None)
        for names in _FIM_NAMES
    )
    if prefix is None or suffix is None or middle is None:
        text = "this model has no tokens for filling in (prefix, suffix, middle): /infill is not supported"
        raise HttpError(501, text)
    if not isinstance(body.prompt, (str, type(None))):
        raise HttpError(400, "prompt must be a text", param="prompt")
    extra = [] if repository is None else [repository, *encode("myproject\n", False)]
    for chunk in body.input_extra or ():
        text, name = chunk.get("text", ""), chunk.get("filename", "tmp")
        if not isinstance(text, str) or not isinstance(name, str):
            raise HttpError(400, "input_extra has objects with a filename and a text", param="input_extra")
        extra += encode(_SNIPPET, False) if file is None else [file, *encode(f"{name}\n", False)]
        extra += encode(text, False)
    if file is not None:
        extra += [file, *encode("filename\n", False)]
    begin = encode("", True)[:1] if tokenizer.bos_token_id in encode("", True)[:1] else []
    before = [prefix, *encode(body.input_prefix, False), *encode(body.prompt or "", False)]
    return [*extra, *begin, *before, suffix, *encode(body.input_suffix, False), middle]


def chosen_fields(answer: Json, paths: Sequence[str]) -> Json:
    """Return the fields of an answer that response_fields names, under these names: "a/b" is b within a."""
    found: Json = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            found[path] = value
    return found
