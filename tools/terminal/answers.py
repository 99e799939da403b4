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
from rich.table import Table

from frontend.async_llm import AsyncLLM
from frontend.lora import LoRARequest
from frontend.results.outputs import CompletionOutput, RequestOutput
from frontend.text.tokenizer import Tokenizer
from ipc.errors import CallFailedError, EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.log_lines import counted
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Statistics
from tools.flags.options import engine_options, print_error
from tools.flags.sampling_options import sampling_params
from tools.terminal.prompts import DEMO_SAMPLING, Question, read_questions
from tools.terminal.streams import OutputConsole, Streams, streams_for

# The times and counts of a run: one record for each request and for the engine, printed as tables or JSON.


class RequestSummary(msgspec.Struct, frozen=True):
    """One answer to a request. Times are in milliseconds, None if the request produced too few tokens."""

    prompt: str
    text: str
    token_ids: list[int]
    ttft_ms: float | None
    tpot_ms: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: str | None
    error: str = ""
    choice: int = 0  # number of the answer within the request, from 0


class EngineSummary(msgspec.Struct, frozen=True):
    """The engine while the requests ran.

    Counters are the difference of two Statistics; maxima are since the start of the engine.
    """

    num_steps: int
    mean_batch_size: float | None
    max_batch_size: int
    prefix_cache_hit_rate: float | None  # tokens found / tokens looked for
    max_used_blocks: int
    num_usable_blocks: int  # without the null block
    block_size: int
    num_preemptions: int
    num_output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    start_s: float | None  # None: the engine was running already
    numerics: str = ""  # the level the engine ran at


class RunSummary(msgspec.Struct, frozen=True):
    """All requests of a run and the engine. engine: None = it ended during the run, or was replaced by another one."""

    requests: list[RequestSummary]
    engine: EngineSummary | None


def summarize_request(prompt: str, result: RequestOutput | Exception, index: int = 0) -> RequestSummary:
    """Return the summary of one answer. result: the request's last output, or the error instead."""
    if isinstance(result, Exception):
        return RequestSummary(prompt, "", [], None, None, 0, 0, 0, "error", str(result), index)
    choice, metrics = result.outputs[index], result.metrics
    return RequestSummary(
        prompt=prompt,
        text=choice.text,
        token_ids=list(choice.token_ids),
        ttft_ms=_milliseconds(metrics.ttft),
        tpot_ms=_milliseconds(metrics.tpot),
        num_prompt_tokens=len(result.prompt_token_ids),
        num_output_tokens=len(choice.token_ids),
        num_cached_tokens=result.num_cached_tokens,
        finish_reason=choice.finish_reason,
        choice=index,
    )


def summarize_engine(
    before: Statistics,
    after: Statistics,
    num_output_tokens: int,
    wall_s: float,
    start_s: float | None,
    numerics: str,
) -> EngineSummary:
    """Return the engine's summary from its statistics before and after the run.

    num_output_tokens: of all requests. wall_s, start_s: seconds; start_s None = the engine was already running.
    """
    num_steps = after.num_steps - before.num_steps
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    num_rows = after.num_scheduled_rows - before.num_scheduled_rows
    return EngineSummary(
        num_steps=num_steps,
        mean_batch_size=round(num_rows / num_steps, 2) if num_steps else None,
        max_batch_size=after.max_scheduled_rows,
        prefix_cache_hit_rate=hits / queries if queries else None,
        max_used_blocks=after.max_used_blocks,
        num_usable_blocks=after.num_blocks - 1,
        block_size=after.block_size,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_output_tokens=num_output_tokens,
        wall_s=round(wall_s, 4),
        output_tokens_per_s=round(num_output_tokens / wall_s, 2) if wall_s > 0 else 0.0,
        start_s=None if start_s is None else round(start_s, 2),
        numerics=numerics,
    )


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print both tables, then the error of each request that failed."""
    console.print(_request_table(summary.requests))
    if summary.engine is not None:
        console.print(_engine_table(summary.engine))
    for index, request in enumerate(summary.requests):
        if request.error and request.choice == 0:
            console.print(f"request {index + 1}: {request.error}", style="red", markup=False, soft_wrap=True)


def _request_table(requests: Sequence[RequestSummary]) -> Table:
    table = Table(title="requests", title_justify="left")
    for name in ("#", "TTFT ms", "TPOT ms", "tokens in", "out", "cached"):
        table.add_column(name, justify="right")
    table.add_column("finish")
    for index, request in enumerate(requests):
        table.add_row(
            str(index + 1),
            _show(request.ttft_ms, ".1f"),
            _show(request.tpot_ms, ".1f"),
            str(request.num_prompt_tokens),
            str(request.num_output_tokens),
            str(request.num_cached_tokens),
            request.finish_reason or "",
        )
    return table


def _engine_table(engine: EngineSummary) -> Table:
    table = Table(title="engine", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    tokens = engine.max_used_blocks * engine.block_size
    rows = {
        "steps": str(engine.num_steps),
        "batch size, mean / max": f"{_show(engine.mean_batch_size, '.2f')} / {engine.max_batch_size}",
        "prefix cache hits": _show(engine.prefix_cache_hit_rate, ".1%"),
        "KV blocks used at most / of": f"{engine.max_used_blocks} / {engine.num_usable_blocks} "
        f"({counted(tokens, 'token')})",
        "preemptions": str(engine.num_preemptions),
        "output tokens": str(engine.num_output_tokens),
        "output tokens/s": f"{engine.output_tokens_per_s:.1f}",
        "numerics": engine.numerics,
        "start-up": "was running" if engine.start_s is None else f"{engine.start_s:.2f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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
            streams.finish(first + choice.index, f"{counted(len(choice.token_ids), 'token')}, {choice.finish_reason}")
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
