"""`engine-core generate`: stream the answers to some prompts at the same time, then report what they took."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import uvloop

from frontend.async_llm import AsyncLLM
from frontend.engine.process import EngineProcess
from frontend.results.outputs import RequestOutput
from frontend.text.tokenizer import Tokenizer
from ipc.config import config_from_options
from ipc.errors import ConfigError, EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.sampling_params import SamplingParams
from tools.options import ArgumentParser, add_engine_options, engine_options
from tools.prompts import DEMO_SAMPLING, Question, read_questions
from tools.start import started_engine
from tools.structured_outputs import add_structured_outputs_options, read_structured_outputs
from tools.summary import RequestSummary, RunSummary, print_summary, summarize_engine, summarize_request
from tools.terminal import OutputConsole, Streams, streams_for

_DEFAULT_MAX_TOKENS = 128
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", *_PENALTIES)


def main(arguments: Sequence[str]) -> int:
    """Answer the prompts and return the exit status: 1 if a request failed. Errors: ConfigError; the engine's."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    if parsed.connect is not None and options:
        given = ", ".join("--" + name.replace("_", "-") for name in options)
        raise ConfigError(f"--connect uses an engine as it runs; leave out {given}")
    _sampling_params(parsed, {})  # a bad value is refused before an engine is started
    with _engine(parsed.connect, options) as (address, process, start_s):
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
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="'-' reads one from standard input; none: a demo")
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    parser.add_argument(
        "--client-name", default="generate", metavar="NAME", help="name that serve --client-weight refers to"
    )
    parser.add_argument("--raw", action="store_true", help="complete the text as it stands, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of every chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    group = parser.add_argument_group("sampling options")
    group.add_argument("--max-tokens", type=int, default=_DEFAULT_MAX_TOKENS, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, metavar="X", help="default: the model's, else 0 = greedy")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    for name in _PENALTIES:
        group.add_argument("--" + name.replace("_", "-"), type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answers")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on until --max-tokens")
    add_structured_outputs_options(parser)
    add_engine_options(parser)
    return parser


@contextlib.contextmanager
def _engine(connect: str | None, options: dict[str, Any]) -> Iterator[tuple[str, EngineProcess | None, float | None]]:
    """Yield (address, process, seconds of its start); the last two are None for an engine that was already running."""
    if connect is not None:
        yield connect, None, None
        return
    with started_engine(config_from_options(**options)) as (process, start_s):
        yield process.address, process, start_s


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
        params = _sampling_params(parsed, llm.client.welcome.default_sampling)
        console = OutputConsole()
        titles = [question.title.replace("\n", " ") for question in questions]
        before = await llm.statistics()
        begin = time.monotonic()
        with contextlib.nullcontext() if parsed.json else streams_for(console, titles) as streams:
            answers = [_answer(llm, question, params, i, streams) for i, question in enumerate(questions)]
            results = await asyncio.gather(*answers)
        wall_s = time.monotonic() - begin
        requests = [summarize_request(title, result) for title, result in zip(titles, results, strict=True)]
        num_tokens = _count_tokens(requests)
        engine = summarize_engine(before, await llm.statistics(), num_tokens, wall_s, start_s, llm.numerics)
    summary = RunSummary(requests, engine)
    if parsed.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        print_summary(console, summary)
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


def _sampling_params(parsed: argparse.Namespace, defaults: Mapping[str, float | int]) -> SamplingParams:
    """Return the sampling parameters of this run. Errors: InvalidRequestError.

    For each field: the value given, else the demo's, else the model's own default, else greedy.
    """
    known = {name: value for name, value in defaults.items() if name in _SAMPLING}
    given = {name: getattr(parsed, name) for name in _SAMPLING if getattr(parsed, name) is not None}
    demo = {} if parsed.prompts else DEMO_SAMPLING
    chosen: dict[str, Any] = {"temperature": 0.0, **known, **demo, **given}
    chosen["structured_outputs"] = read_structured_outputs(parsed)
    return SamplingParams(max_tokens=parsed.max_tokens, ignore_eos=parsed.ignore_eos, **chosen)


def _count_tokens(requests: Sequence[RequestSummary]) -> int:
    return sum(request.num_output_tokens for request in requests)
