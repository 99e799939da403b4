"""`engine-core generate`: stream the answers to some prompts at the same time, then report what they took."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence

import msgspec
import uvloop
from rich.console import Console

from frontend.async_llm import AsyncLLM
from frontend.results.outputs import RequestOutput
from frontend.text.tokenizer import Tokenizer
from ipc.errors import EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.sampling_params import SamplingParams
from tools.options import ArgumentParser, add_engine_options, engine_options, print_error
from tools.prompts import DEMO_SAMPLING, Question, read_piped_prompt, read_questions
from tools.sampling_options import add_sampling_options, sampling_params
from tools.start import check_connect, engine_at
from tools.summary import RequestSummary, RunSummary, print_summary, summarize_engine, summarize_request
from tools.terminal import OutputConsole, Streams, streams_for

_DEFAULT_MAX_TOKENS = 128


def main(arguments: Sequence[str]) -> int:
    """Answer the prompts and return the exit status: 1 if a request failed. Errors: ConfigError; the engine's."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    check_connect(parsed.connect, options)
    sampling_params(parsed, {}, {})  # a bad value is refused before an engine is started
    read_piped_prompt(parsed.prompts)
    with engine_at(parsed.connect, options, is_quiet=parsed.quiet) as (address, process, start_s):
        try:
            summary = uvloop.run(_run(parsed, address, start_s))
        except EngineDeadError as error:
            ended = process.describe_exit() if process is not None else ""
            raise EngineDeadError(ended or str(error)) from error
    return 1 if any(request.error for request in summary.requests) else 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core generate",
        usage="engine-core generate [PROMPT ...] [--model PATH | --connect ADDR] [OPTION ...]",
        description="Stream the answers to prompts, all at once.",
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="'-', or none before a pipe, reads one from standard input; else none: a demo",
    )
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    parser.add_argument(
        "--client-name", default="generate", metavar="NAME", help="name that serve --client-weight refers to"
    )
    parser.add_argument("--raw", action="store_true", help="complete the text as it stands, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of every chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    parser.add_argument("--quiet", "-q", action="store_true", help="print the answers, and nothing else")
    add_sampling_options(parser, max_tokens=_DEFAULT_MAX_TOKENS)
    add_engine_options(parser)
    return parser


async def _run(parsed: argparse.Namespace, address: str, start_s: float | None) -> RunSummary:
    async with await AsyncLLM.create(connect=address, client_name=parsed.client_name) as llm:
        tokenizer = _tokenizer(llm)
        questions = read_questions(
            parsed.prompts,
            system=parsed.system,
            raw=parsed.raw,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        )
        demo = {} if parsed.prompts else DEMO_SAMPLING
        params = sampling_params(parsed, llm.client.welcome.default_sampling, demo)
        console = OutputConsole()
        titles = [question.title.replace("\n", " ") for question in questions]
        before = await llm.statistics()
        begin = time.monotonic()
        with (
            contextlib.nullcontext() if parsed.json else streams_for(console, titles, is_plain=parsed.quiet) as streams
        ):
            answers = [_answer(llm, question, params, i, streams) for i, question in enumerate(questions)]
            results = await asyncio.gather(*answers)
        wall_s = time.monotonic() - begin
        requests = [summarize_request(title, result) for title, result in zip(titles, results, strict=True)]
        num_tokens = _count_tokens(requests)
        engine = summarize_engine(before, await llm.statistics(), num_tokens, wall_s, start_s, llm.numerics)
    summary = RunSummary(requests, engine)
    if parsed.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    elif parsed.quiet:
        for request in requests:
            if request.error:
                print_error(request.error)
    else:  # beside answers in a pipe, tables stand on standard error
        print_summary(console if console.is_terminal else Console(stderr=True, highlight=False), summary)
    return summary


async def _answer(
    llm: AsyncLLM, question: Question, params: SamplingParams, index: int, streams: Streams | None
) -> RequestOutput | EngineCoreError:
    """Return the request's last output, or the error with which it failed alone.

    Errors: EngineDeadError, which concerns all requests.
    """
    if question.chat is not None:
        outputs = llm.chat(question.chat, params)
    else:
        outputs = llm.generate(question.token_ids or question.text, params)
    last: RequestOutput | None = None
    try:
        async for last in outputs:
            if streams is not None:
                streams.update(index, _shown_text(question, last))
    except EngineDeadError:
        raise
    except EngineCoreError as error:
        if streams is not None:
            streams.finish(index, "failed")
        return error
    assert last is not None, f"request {index} ended without an output"
    if streams is not None:
        streams.finish(index, f"{len(last.outputs[0].token_ids)} tokens, {last.outputs[0].finish_reason}")
    return last


def _shown_text(question: Question, output: RequestOutput) -> str:
    choice = output.outputs[0]
    return choice.text if question.token_ids is None else " ".join(map(str, choice.token_ids))


def _tokenizer(llm: AsyncLLM) -> Tokenizer | None:
    try:
        return llm.get_tokenizer()
    except InvalidRequestError:
        return None


def _count_tokens(requests: Sequence[RequestSummary]) -> int:
    return sum(request.num_output_tokens for request in requests)
