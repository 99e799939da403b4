"""`engine-core chat` and `engine-core run`: a conversation in the terminal, or one answer as plain text.

With a prompt, or with text on standard input, only the answer is written, as it arrives: for pipes. The model runs in
an engine of its own, in the one at --connect, or in a server (--url), which loads it if it has to.
"""

import argparse
import asyncio
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from frontend.async_llm import AsyncLLM
from frontend.lora import LoRARequest
from frontend.session import Message
from frontend.text.known_tokenizers import make_ahead
from ipc.errors import ConfigError, EngineCoreError, EngineDeadError, PromptTooLongError
from ipc.log_lines import counted
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.flags.sampling_options import add_lora_option, add_sampling_options, given_fields, sampling_params
from tools.service.server_call import DEFAULT_URL, ServerError, add_url, stream_chat
from tools.service.start import check_connect, engine_at
from tools.terminal.streams import printable

_MAX_TOKENS = 1024
_HELP = """/clear          forget the conversation
/system TEXT    start a new conversation with this system message
/bye            leave, as Ctrl-D does; Ctrl-C ends an answer"""


def main(arguments: Sequence[str]) -> int:
    """Chat until the end of the input, and return the exit status. Errors: ConfigError; the engine's."""
    parser = ArgumentParser(
        prog="engine-core chat",
        usage="engine-core chat [MODEL] [PROMPT ...] [--connect ADDR | --url URL] [OPTION ...]     (run is the same)",
        description="Chat with a model. With a PROMPT, or text on standard input: one answer, as plain text.",
    )
    text = "the same as --model, or the name of a server's model; default: the demo model"
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="words of one question")
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    add_url(parser, None, "use the model of this name at this HTTP server (of `engine-core serve --models`)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress and no line about an answer's time")
    add_lora_option(parser)
    add_sampling_options(parser, max_tokens=_MAX_TOKENS)
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    words = list(parsed.prompt)
    options = engine_options(parsed)
    if parsed.model_name is not None and _is_question(parsed.model_name):
        words.insert(0, parsed.model_name)
    elif parsed.model_name is not None:
        options["model"] = parsed.model_name
    sampling_params(parsed, {}, {})  # refuse a bad value before an engine starts
    url = _url_of(parsed, options)
    if url is None:
        check_connect(parsed.connect, options)
    question = " ".join(words)
    if not sys.stdin.isatty():
        question = "\n\n".join(filter(None, (question, sys.stdin.read().strip())))
        if not question:
            parser.error("there is no terminal to chat in and no prompt on standard input")
    with _server_model(url, parsed, options) if url is not None else _engine_model(parsed, options) as model:
        chat = Conversation(model, parsed.system)
        if question:
            return _answer_once(chat, question)
        return _converse(chat, is_quiet=parsed.quiet)


def _url_of(parsed: argparse.Namespace, options: Mapping[str, Any]) -> str | None:
    """Return the address of the server that is to answer; None = an engine answers.

    A name that is no file and cannot be on the Hub is one of a server's. Errors: ConfigError for options that do not go
    together.
    """
    name: str | None = options.get("model")
    is_other = name is not None and not ("/" in name or name.endswith(".gguf") or os.path.exists(name))
    if parsed.url is None and (parsed.connect is not None or not is_other):
        return None
    if parsed.connect is not None:
        raise ConfigError("--url names an HTTP server and --connect an engine: leave out one of them")
    if others := [option for option in options if option != "model"]:
        given = ", ".join("--" + option.replace("_", "-") for option in others)
        raise ConfigError(f"the server's models have their own options; leave out {given}")
    return parsed.url or DEFAULT_URL


class Model(Protocol):
    """What answers a conversation."""

    def answer(self, messages: list[Message], write: Callable[[str, int], None]) -> None:
        """Call write with each new text and the number of its tokens. Errors: EngineCoreError; KeyboardInterrupt."""


class _EngineModel:
    def __init__(self, runner: asyncio.Runner, llm: AsyncLLM, params: SamplingParams, lora: LoRARequest | None) -> None:
        self._runner, self._llm, self._params, self._lora = runner, llm, _deltas(params), lora

    def answer(self, messages: list[Message], write: Callable[[str, int], None]) -> None:
        async def stream() -> None:
            async for output in self._llm.chat(messages, self._params, lora_request=self._lora):
                write(output.outputs[0].text, len(output.outputs[0].token_ids))

        self._runner.run(stream())


@contextlib.contextmanager
def _engine_model(parsed: argparse.Namespace, options: Mapping[str, Any]) -> Iterator[Model]:
    """Yield the model of an engine: of the one at --connect, otherwise of a new one."""
    started = engine_at(parsed.connect, options, is_quiet=parsed.quiet, meanwhile=make_ahead)
    with started as (address, process, _), asyncio.Runner() as runner:
        try:
            template = options.get("chat_template") if parsed.connect is not None else None
            llm = runner.run(AsyncLLM.create(connect=address, client_name="chat", chat_template=template))
            params = sampling_params(parsed, llm.client.welcome.default_sampling, {})
            with contextlib.closing(llm):
                yield _EngineModel(runner, llm, params, LoRARequest(parsed.lora, 1) if parsed.lora else None)
        except EngineDeadError as error:
            raise EngineDeadError((process.describe_exit() if process is not None else "") or str(error)) from error


class _ServerModel:
    def __init__(self, url: str, fields: Mapping[str, Any]) -> None:
        self._url, self._fields = url, fields

    def answer(self, messages: list[Message], write: Callable[[str, int], None]) -> None:
        body = {**self._fields, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        with contextlib.closing(stream_chat(self._url, body)) as events:
            for event in events:
                text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                write(text, (event.get("usage") or {}).get("completion_tokens", 0))


@contextlib.contextmanager
def _server_model(url: str, parsed: argparse.Namespace, options: Mapping[str, Any]) -> Iterator[Model]:
    """Yield a model of a server: the adapter, the model of this name, or the first one that it has."""
    name = parsed.lora or options.get("model")
    try:
        yield _ServerModel(url, given_fields(parsed) | ({"model": name} if name else {}))
    except ServerError as error:
        if error.status or parsed.url is not None:
            raise
        text = f"{name!r:.200} is no file, folder or name on the Hub, so it would be a model of a server"
        raise ServerError(f"{text}, but {error}") from None


def _is_question(text: str) -> bool:
    """Return whether the first word on the command line is a prompt, and no model was named."""
    return any(character.isspace() for character in text) and not os.path.exists(text)


class Conversation:
    """The messages so far, and the model that answers. Errors of ask(): those of Model.answer()."""

    def __init__(self, model: Model, system: str | None) -> None:
        self._model = model
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget what was said. system: None = no system message."""
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, question: str) -> tuple[int, float]:
        """Write the answer to standard output as it arrives; return (tokens, tokens a second).

        After Ctrl-C (KeyboardInterrupt) the conversation has what was written; after an error it does not have the
        question.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": question})
        self._said, self._num_tokens, begin = "", 0, time.monotonic()
        try:
            self._model.answer(self.messages, self._write)
        except EngineCoreError:
            self.messages = before
            raise
        finally:
            if len(self.messages) > len(before):
                self.messages.append({"role": "assistant", "content": self._said})
        return self._num_tokens, self._num_tokens / (time.monotonic() - begin)

    def _write(self, text: str, num_tokens: int) -> None:
        self._said += text
        self._num_tokens += num_tokens
        sys.stdout.write(printable(text))
        sys.stdout.flush()


def _deltas(params: SamplingParams) -> SamplingParams:
    """Return the parameters with outputs that contain only new text."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    return params


def _answer_once(chat: Conversation, question: str) -> int:
    chat.ask(question)
    sys.stdout.write("\n")
    return 0


def _converse(chat: Conversation, *, is_quiet: bool) -> int:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # importing it gives input() history and editing
    print("Ctrl-D or /bye leaves, /help shows more", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\nCtrl-D or /bye leaves", file=sys.stderr)
            continue
        if line in ("/bye", "/exit", "/quit"):
            return 0
        if line.startswith("/"):
            print(_do(chat, line), file=sys.stderr)
        elif line:
            _say(chat, line, is_quiet=is_quiet)


def _do(chat: Conversation, line: str) -> str:
    command, _, text = line.partition(" ")
    if command == "/clear":
        system = next((one["content"] for one in chat.messages if one["role"] == "system"), None)
        chat.begin(system)
        return "forgotten"
    if command == "/system" and text:
        chat.begin(text)
        return "a new conversation"
    return _HELP


def _say(chat: Conversation, question: str, *, is_quiet: bool) -> None:
    try:
        num_tokens, rate = chat.ask(question)
    except KeyboardInterrupt:
        print()
        return
    except EngineDeadError:
        raise
    except EngineCoreError as error:
        hint = "; /clear begins a new conversation" if isinstance(error, PromptTooLongError) else ""
        print(f"\nengine-core: error: {error}{hint}", file=sys.stderr)
        return
    print()
    if not is_quiet:
        print(f"({counted(num_tokens, 'token')}, {rate:.1f} a second)", file=sys.stderr)
