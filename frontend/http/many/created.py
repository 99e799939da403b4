"""read_create: the options of a model that /api/create makes, from its fields or from a Modelfile."""

import re
from typing import Any

import msgspec

from frontend.http.errors import HttpError
from ipc.params.sampling_params import NUMBERS

#: Names of parameters in Ollama and here -> names of defaults that an engine takes (override_generation_config).
_NAMES = {
    other: name for name, one in NUMBERS.items() if one.parameter.gguf for other in (name, *one.parameter.names)
} | dict.fromkeys(("num_predict", "max_tokens"), "max_new_tokens")
_LENGTH = "num_ctx"
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s+(?:\"\"\"(.*?)\"\"\"|([^\n]*))[ \t]*(?:\n|$)", re.S)
#: Signs of a template in Go's language, which Ollama's models have.
_GO = re.compile(r"\{\{-?\s*(?:\.|if|range|end|else|template|with|block|\$)")


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    modelfile: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] | None = None
    adapters: dict[str, str] | None = None
    quantize: str | None = None
    files: dict[str, str] | None = None
    messages: list[Any] | None = None
    license: Any = None


def read_create(body: bytes) -> tuple[str, dict[str, Any]]:
    """Return what the model is made from, and its further options. Errors: HttpError 400."""
    try:
        given = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body cannot be read: {error}") from None
    if given.modelfile is not None:
        _read_modelfile(given, given.modelfile)
    for name in ("quantize", "files", "messages"):
        if getattr(given, name):
            raise HttpError(400, f"{name} is not supported: a model is created from files on the server", param=name)
    if not given.from_:
        raise HttpError(400, "say what the model is made from: from, or FROM in modelfile", param="from")
    options: dict[str, Any] = {}
    if given.system:
        options["system"] = given.system
    if given.template:
        if _GO.search(given.template):
            raise HttpError(400, "a template here is in Jinja's language, not in Go's", param="template")
        if "{" not in given.template:  # the engine's option would take it for the path of a file
            raise HttpError(400, "template must be the text of a template, which contains a brace", param="template")
        options["chat_template"] = given.template
    if given.adapters:
        if len(given.adapters) > 1:
            raise HttpError(400, "a model has at most one adapter of its own", param="adapters")
        options["adapters"] = {given.model or given.name or "": next(iter(given.adapters.values()))}
    if given.parameters:
        if _LENGTH in given.parameters:
            options["max_model_len"] = _number(_LENGTH, given.parameters.pop(_LENGTH))
        options["override_generation_config"] = _numbers(given.parameters)
    return given.from_, options


def _read_modelfile(given: _Body, text: str) -> None:
    """Read the instructions of a Modelfile into the fields of a body. Errors: HttpError 400."""
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    at, parameters, adapters = 0, dict[str, Any](), dict[str, str]()
    while lines[at:].strip():
        found = _INSTRUCTION.match(lines, at)
        if found is None:
            raise HttpError(400, f"the modelfile has no instruction at {lines[at:].strip()!r:.60}", param="modelfile")
        at, kind = found.end(), found[1].upper()
        value = found[3].strip().strip('"') if found[2] is None else found[2]
        if kind == "FROM":
            given.from_ = value
        elif kind == "SYSTEM":
            given.system = value
        elif kind == "TEMPLATE":
            given.template = value
        elif kind == "ADAPTER":
            adapters[value] = value
        elif kind == "PARAMETER":
            name, _, number = value.partition(" ")
            parameters[name] = number.strip().strip('"')
        elif kind != "LICENSE":
            known = "FROM, PARAMETER, SYSTEM, TEMPLATE, ADAPTER and LICENSE"
            raise HttpError(400, f"the instruction {kind} is not supported; known: {known}", param="modelfile")
    given.parameters = {**parameters, **(given.parameters or {})} or None
    given.adapters = {**adapters, **(given.adapters or {})} or None


def _numbers(parameters: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in parameters.items():
        if name not in _NAMES:
            known = ", ".join(sorted({*_NAMES, _LENGTH}))
            text = f"a model has no default of the parameter {name!r:.60}; known: {known}"
            raise HttpError(400, text, param="parameters")
        found[_NAMES[name]] = _number(name, value)
    return found


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise HttpError(400, f"the parameter {name} is a number; got {value!r:.60}", param="parameters") from None
    return int(number) if number.is_integer() else number
