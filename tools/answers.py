"""The answers of `engine-core generate`: streamed to a terminal, or one JSON object.

It is imported while the engine starts: what it needs takes as long to import as a part of the start.
"""

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
from ipc.errors import CallFailedError, EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.sampling_params import SamplingParams
from tools.options import print_error
from tools.prompts import DEMO_SAMPLING, Question, read_questions
from tools.sampling_options import sampling_params
from tools.summary import RequestSummary, RunSummary, print_summary, summarize_engine, summarize_request
from tools.terminal import OutputConsole, Streams, streams_for


def answer_all(parsed: argparse.Namespace, address: str, start_s: float | None) -> RunSummary:
    """Answer the prompts by the engine at this address. parsed: of generate. Errors: those of the engine."""
    return uvloop.run(_run(parsed, address, start_s))


async def _run(parsed: argparse.Namespace, address: str, start_s: float | None) -> RunSummary:
    async with await AsyncLLM.create(connect=address, client_name=parsed.client_name) as llm:
        tokenizer = _tokenizer(llm)
        questions = read_questions(
            parsed.prompts,
            system=parsed.system,
            raw=parsed.raw,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
            images=parsed.image,
        )
        demo = {} if parsed.prompts else DEMO_SAMPLING
        params = sampling_params(parsed, llm.client.welcome.default_sampling, demo)
        console = OutputConsole()
        titles = [question.title.replace("\n", " ") for question in questions]
        before, engine_id = await llm.statistics(), llm.client.welcome.engine_id
        begin = time.monotonic()
        with (
            contextlib.nullcontext() if parsed.json else streams_for(console, titles, is_plain=parsed.quiet) as streams
        ):
            answers = [_answer(llm, question, params, i, streams) for i, question in enumerate(questions)]
            results = await asyncio.gather(*answers)
        wall_s = time.monotonic() - begin
        requests = [summarize_request(title, result) for title, result in zip(titles, results, strict=True)]
        num_tokens = _count_tokens(requests)
        engine = None
        with contextlib.suppress(EngineDeadError, CallFailedError):  # it had been told to end after these answers
            after = await llm.statistics()
            if llm.client.welcome.engine_id == engine_id:
                engine = summarize_engine(before, after, num_tokens, wall_s, start_s, llm.numerics)
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
