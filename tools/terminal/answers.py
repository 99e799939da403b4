"""The answers of `engine-core generate`: streamed to a terminal, or one JSON object.

It is imported while the engine starts, because its imports take long.
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
from frontend.lora import LoRARequest
from frontend.results.outputs import CompletionOutput, RequestOutput
from frontend.text.tokenizer import Tokenizer
from ipc.errors import CallFailedError, EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from tools.flags.options import engine_options, print_error
from tools.flags.sampling_options import sampling_params
from tools.terminal.prompts import DEMO_SAMPLING, Question, read_questions
from tools.terminal.streams import OutputConsole, Streams, streams_for
from tools.terminal.summary import RequestSummary, RunSummary, print_summary, summarize_engine, summarize_request


def answer_all(parsed: argparse.Namespace, address: str, start_s: float | None) -> RunSummary:
    """Answer the prompts with the engine at this address.

    parsed: arguments of `generate`. Errors: those of the engine.
    """
    return uvloop.run(_run(parsed, address, start_s))


async def _run(parsed: argparse.Namespace, address: str, start_s: float | None) -> RunSummary:
    template = engine_options(parsed).get("chat_template") if parsed.connect is not None else None
    async with await AsyncLLM.create(connect=address, client_name=parsed.client_name, chat_template=template) as llm:
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
        titles = _titles(questions, params.n)
        before, engine_id = await llm.statistics(), llm.client.welcome.engine_id
        begin = time.monotonic()
        with (
            contextlib.nullcontext() if parsed.json else streams_for(console, titles, is_plain=parsed.quiet) as streams
        ):
            lora = LoRARequest(parsed.lora, 1) if parsed.lora else None
            answers = [_answer(llm, question, params, lora, i, streams) for i, question in enumerate(questions)]
            results = await asyncio.gather(*answers)
        wall_s = time.monotonic() - begin
        requests = [
            summarize_request(question.title.replace("\n", " "), result, choice)
            for question, result in zip(questions, results, strict=True)
            for choice in range(params.n)
        ]
        num_tokens = _count_tokens(requests)
        engine = None
        with contextlib.suppress(EngineDeadError, CallFailedError):  # it had been asked to end after these answers
            after = await llm.statistics()
            if llm.client.welcome.engine_id == engine_id:
                engine = summarize_engine(before, after, num_tokens, wall_s, start_s, llm.numerics)
    summary = RunSummary(requests, engine)
    if parsed.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    elif parsed.quiet:
        for request in requests:
            if request.error and request.choice == 0:
                print_error(request.error)
    else:  # if answers go to a pipe, tables go to standard error
        print_summary(console if console.is_terminal else Console(stderr=True, highlight=False), summary)
    return summary


def _titles(questions: Sequence[Question], n: int) -> list[str]:
    """Return the title of each answer, n for each question."""
    titles = [question.title.replace("\n", " ") for question in questions]
    return [f"{title} [{choice + 1}/{n}]" if n > 1 else title for title in titles for choice in range(n)]


async def _answer(
    llm: AsyncLLM,
    question: Question,
    params: SamplingParams,
    lora: LoRARequest | None,
    index: int,
    streams: Streams | None,
) -> RequestOutput | EngineCoreError:
    """Return the last output of request `index`, or the error that failed it alone.

    Errors: EngineDeadError, which concerns all requests.
    """
    if question.chat is not None:
        outputs = llm.chat(question.chat, params, lora_request=lora)
    else:
        outputs = llm.generate(question.token_ids or question.text, params, lora_request=lora)
    last: RequestOutput | None = None
    first = index * params.n  # the stream of its first answer
    try:
        async for last in outputs:
            if streams is not None:
                for choice in last.outputs:
                    streams.update(first + choice.index, _shown_text(question, choice))
    except EngineDeadError:
        raise
    except EngineCoreError as error:
        if streams is not None:
            for choice_index in range(params.n):
                streams.finish(first + choice_index, "failed")
        return error
    assert last is not None, f"request {index} ended without an output"
    if streams is not None:
        for choice in last.outputs:
            streams.finish(first + choice.index, f"{len(choice.token_ids)} tokens, {choice.finish_reason}")
    return last


def _shown_text(question: Question, choice: CompletionOutput) -> str:
    return choice.text if question.token_ids is None else " ".join(map(str, choice.token_ids))


def _tokenizer(llm: AsyncLLM) -> Tokenizer | None:
    try:
        return llm.get_tokenizer()
    except InvalidRequestError:
        return None


def _count_tokens(requests: Sequence[RequestSummary]) -> int:
    return sum(request.num_output_tokens for request in requests)
