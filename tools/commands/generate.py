"""`engine-core generate`: stream the answers to several prompts at the same time, then report times and counts."""

import argparse
from collections.abc import Sequence
from types import ModuleType

from ipc.errors import EngineDeadError
from ipc.options.config import EngineConfig
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.flags.sampling_options import add_lora_option, add_sampling_options, sampling_params
from tools.service.start import check_connect, engine_at
from tools.terminal.prompts import add_chat_options, read_piped_prompt

_DEFAULT_MAX_TOKENS = 128


def main(arguments: Sequence[str]) -> int:
    """Answer the prompts and return the exit status: 1 if a request failed. Errors: ConfigError; the engine's."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    check_connect(parsed.connect, options)
    sampling_params(parsed, {}, {})  # refuse a bad value before an engine starts
    read_piped_prompt(parsed.prompts)
    started = engine_at(parsed.connect, options, is_quiet=parsed.quiet, meanwhile=_prepare_answers)
    with started as (address, process, start_s):
        try:
            summary = _answers().answer_all(parsed, address, start_s)
        except EngineDeadError as error:
            ended = process.describe_exit() if process is not None else ""
            raise EngineDeadError(ended or str(error)) from error
    return 1 if any(request.error for request in summary.requests) else 0


def _prepare_answers(config: EngineConfig) -> None:
    """Make what the answers need: their tokenizer takes as long as an engine's start."""
    _answers()
    # Imported late: it takes long, and so overlaps with the engine's start.
    from frontend.text.known_tokenizers import make_ahead

    make_ahead(config)


def _answers() -> ModuleType:
    from tools.terminal import answers  # its import overlaps with the engine's start

    return answers


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core generate",
        usage="engine-core generate [PROMPT ...] [--model PATH | --connect ADDR] [OPTION ...]",
        description="Answer prompts and stream all answers at the same time.",
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="'-' reads a prompt from standard input, and so does no prompt if input is piped; otherwise, without a "
        "prompt: a demo",
    )
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    parser.add_argument(
        "--client-name",
        default="generate",
        metavar="NAME",
        help="this client's name, to which serve --client-weight refers",
    )
    parser.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    add_chat_options(parser, "system message of every chat", "an image for every prompt")
    parser.add_argument("--json", action="store_true", help="print only one JSON object, at the end")
    parser.add_argument("--quiet", "-q", action="store_true", help="print only the answers")
    add_lora_option(parser)
    add_sampling_options(parser, max_tokens=_DEFAULT_MAX_TOKENS)
    add_engine_options(parser)
    return parser
