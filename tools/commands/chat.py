"""`engine-core chat` and `engine-core run`: a conversation in the terminal, or one answer as plain text.

With a prompt, or with text on standard input, only the answer is written, as it arrives: for pipes.
"""

import asyncio
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from frontend.async_llm import AsyncLLM
from frontend.lora import LoRARequest
from frontend.session import Message
from ipc.errors import EngineCoreError, EngineDeadError, PromptTooLongError
from ipc.log_lines import counted
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.flags.sampling_options import add_lora_option, add_sampling_options, sampling_params
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
        usage="engine-core chat [MODEL] [PROMPT ...] [--connect ADDR] [OPTION ...]     (run is the same)",
        description="Chat with a model. With a PROMPT, or text on standard input: one answer, as plain text.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model; default: the demo model")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="words of one question")
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
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
    check_connect(parsed.connect, options)
    sampling_params(parsed, {}, {})  # refuse a bad value before an engine starts
    question = " ".join(words)
    if not sys.stdin.isatty():
        question = "\n\n".join(filter(None, (question, sys.stdin.read().strip())))
        if not question:
            parser.error("there is no terminal to chat in and no prompt on standard input")
    with engine_at(parsed.connect, options, is_quiet=parsed.quiet) as (address, process, _), asyncio.Runner() as runner:
        try:
            template = options.get("chat_template") if parsed.connect is not None else None
            llm = runner.run(AsyncLLM.create(connect=address, client_name="chat", chat_template=template))
            params = sampling_params(parsed, llm.client.welcome.default_sampling, {})
            lora = LoRARequest(parsed.lora, 1) if parsed.lora else None
            chat = Conversation(runner, llm, params, parsed.system, lora=lora)
            with contextlib.closing(llm):
                if question:
                    return _answer_once(chat, question)
                return _converse(chat, is_quiet=parsed.quiet)
        except EngineDeadError as error:
            raise EngineDeadError((process.describe_exit() if process is not None else "") or str(error)) from error


def _is_question(text: str) -> bool:
    """Return whether the first word on the command line is a prompt, and no model was named."""
    return any(character.isspace() for character in text) and not os.path.exists(text)


class Conversation:
    """The messages so far, and the engine that answers. Errors of ask(): those of AsyncLLM.chat()."""

    def __init__(
        self,
        runner: asyncio.Runner,
        llm: AsyncLLM,
        params: SamplingParams,
        system: str | None,
        *,
        lora: LoRARequest | None = None,
    ) -> None:
        self._runner, self._llm, self._params, self._lora = runner, llm, params, lora
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
            self._runner.run(self._stream())
        except EngineCoreError:
            self.messages = before
            raise
        finally:
            if len(self.messages) > len(before):
                self.messages.append({"role": "assistant", "content": self._said})
        return self._num_tokens, self._num_tokens / (time.monotonic() - begin)

    async def _stream(self) -> None:
        params: Any = self._params
        async for output in self._llm.chat(self.messages, _deltas(params), lora_request=self._lora):
            text = output.outputs[0].text
            self._said += text
            self._num_tokens += len(output.outputs[0].token_ids)
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
