"""`engine-core eval-check`: five small evaluations at several batch sizes, with speculation, preempted and killed.

The tasks have lm_eval's forms: multiple choice, last word, perplexity and generation. Each configuration writes the
same result file, or the engine does not do what numerics level L2 promises: scores do not depend on how they are run.
"""

import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from frontend.llm import LLM
from frontend.results.outputs import RequestOutput
from frontend.text.prompt_forms import TokensPrompt
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError
from ipc.params.sampling_params import SamplingParams
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.eval_tasks import METRICS, MOST_NEW_TOKENS, TASKS, UNTIL, Task, write_tasks
from tools.service.start import check_connect

EXIT_SAME = 0
EXIT_DIFFERS = 3
EXIT_NOT_PROVED = 4  # a configuration did not have its subject: no draft, no preemption, no kill
MODES = ("plain", "speculation", "preempted", "killed")
_BATCH_SIZES = (1, 8, 64)
_MODEL_LEN = 160
_FEWEST_ROWS = 4
_SMALL_BLOCK, _SMALL_BUDGET = 4, 24  # tokens of a block and of a step, where requests are to be preempted
_KILL_AFTER_S = 0.02  # from the middle batch's beginning
_NUM_OTHERS, _SLACK = 2, 3  # requests; blocks that they leave, more than a prompt needs
_OTHER_PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "step_ns": (10**6,) * 8}


class Ask(NamedTuple):
    """One request of an evaluation. first: the place of the first token whose probability counts; None: its answer."""

    task: Task
    document: int
    prompt: list[int]
    first: int | None


class Sample(msgspec.Struct, frozen=True):
    """What the evaluation got for one request; a line of the result file."""

    task: str
    document: int
    sum: float | None  # of the log probabilities
    is_greedy: bool | None  # whether each token was the most likely one
    text: str | None


class Run(msgspec.Struct, frozen=True):
    """One configuration; an object of --json."""

    mode: str
    batch_size: int
    sha256: str
    seconds: float
    count: int  # of drafts, preemptions or kills


def main(arguments: Sequence[str]) -> int:
    """Evaluate in each configuration; return the exit status. Errors: ConfigError; those of the engine."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if not all(1 <= size <= 4096 for size in parsed.batch_sizes):
        parser.error("--batch-sizes must be from 1 to 4096")
    if parsed.write_tasks is not None:
        for path in write_tasks(Path(parsed.write_tasks)):
            print(path)
        return EXIT_SAME
    options = engine_options(parsed)
    if parsed.model_name is not None:
        options["model"] = parsed.model_name
    check_connect(parsed.connect, options)
    modes = parsed.modes or (MODES if parsed.connect is None else ("plain",))
    if parsed.connect is not None:
        options = {"connect": parsed.connect, "client_name": "eval-check"}
        if set(modes) != {"plain"}:
            parser.error("--connect uses an engine as it runs: only --modes plain")
    runs, results = list[Run](), dict[str, bytes]()
    for mode, batch_size in product(modes, parsed.batch_sizes):
        run, result = evaluate(mode, batch_size, options)
        runs.append(run)
        results.setdefault(run.sha256, result)
        if not parsed.json:
            _print_run(run, with_head=len(runs) == 1)
    lacking = [run for run in runs if run.mode != "plain" and not run.count]
    if parsed.output is not None:
        _write(Path(parsed.output), list(results.values()))
    status = EXIT_DIFFERS if len(results) > 1 else EXIT_NOT_PROVED if lacking else EXIT_SAME
    if parsed.json:
        found = {"runs": msgspec.to_builtins(runs), "scores": scores(results[runs[0].sha256]), "hashes": list(results)}
        print(json.dumps({**found, "difference": difference(list(results.values()))}))
    else:
        _print_end(runs, results, lacking)
    return status


def _print_end(runs: Sequence[Run], results: Mapping[str, bytes], lacking: Sequence[Run]) -> None:
    for name, (metric, value) in scores(results[runs[0].sha256]).items():
        print(f"{name:>12}: {metric} {value:.4f}")
    for run in lacking:
        print(f"nothing is proved by {run.mode} at batch size {run.batch_size}: there was none")
    if len(results) > 1:
        print(f"the first difference: {difference(list(results.values()))}")
    print(f"{len(runs)} configurations, {len(results)} result{'s' * (len(results) > 1)}: {', '.join(results)}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core eval-check",
        usage="engine-core eval-check [MODEL | --connect ADDR] [-o FILE] [OPTION ...]",
        description="Run five small evaluations at several batch sizes, with speculation, preempted and with a killed "
        "engine, and compare the result files.",
        epilog="exit status: 0 all result files are the same, 1 error, 2 usage, 3 they differ, 4 a configuration had "
        "no draft, no preemption or no kill, so it proves nothing",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model; default: the demo model")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(_BATCH_SIZES), metavar="N")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all; with --connect: plain")
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address, among its other requests")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result there; another one to FILE.2, ...")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    parser.add_argument(
        "--write-tasks", metavar="FOLDER", help="write the tasks there in lm_eval's form, and do nothing else"
    )
    add_engine_options(parser)
    return parser


def evaluate(mode: str, batch_size: int, options: Mapping[str, Any]) -> tuple[Run, bytes]:
    """Return what an engine of its own has in this configuration, and its result file.

    options: of the engine; or connect, for a running one.

    Errors: ConfigError; those of the engine.
    """
    sizes = {"max_model_len": _MODEL_LEN, "max_num_seqs": max(batch_size, _FEWEST_ROWS)}
    common = {**({} if "connect" in options else sizes), **options}
    if mode == "speculation":
        common["speculative_config"] = _DRAFTS
    if mode == "killed":
        common["flight_recorder_bytes"] = 0  # nothing is to be learnt from this death
    if mode == "preempted":
        common |= {"block_size": _SMALL_BLOCK, "max_num_batched_tokens": _SMALL_BUDGET, "max_model_len": _MODEL_LEN}
        common |= {"num_blocks_override": _MODEL_LEN // _SMALL_BLOCK + 1}
        common["max_num_seqs"] = min(common["max_num_seqs"], _SMALL_BUDGET)
        common.pop("kv_cache_memory_bytes", None)
    with LLM(**common) as llm:
        asks, begin = make_asks(llm.get_tokenizer()), time.monotonic()
        samples, count = _run(llm, asks, batch_size, mode)
        seconds, result = time.monotonic() - begin, encode(samples)
    return Run(mode, batch_size, hashlib.sha256(result).hexdigest(), seconds, count), result


def make_asks(tokenizer: Tokenizer) -> list[Ask]:
    """Return the requests of all tasks, tokenized as lm_eval does: context and continuation as one text."""
    asks = []
    for task in TASKS:
        for number, document in enumerate(task.documents):
            context = tokenizer.encode(document.text, add_special_tokens=False)
            if task.form == "generate_until":
                asks.append(Ask(task, number, context, None))
                continue
            if task.form == "loglikelihood_rolling":
                context = [_first_token(tokenizer)]
            for target in document.choices or [str(document.answer)]:
                if task.form == "loglikelihood_rolling":
                    whole = context + tokenizer.encode(target, add_special_tokens=False)
                else:
                    whole = tokenizer.encode(document.text + target, add_special_tokens=False)
                asks.append(Ask(task, number, whole, len(context)))
    return asks


def _first_token(tokenizer: Tokenizer) -> int:
    """Return the token before a text whose perplexity is asked for, which is lm_eval's choice. Errors: ConfigError."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ConfigError(
        "the model's tokenizer has no BOS and no EOS token, one of which must stand before a text that is scored"
    )


def _run(llm: LLM, asks: Sequence[Ask], batch_size: int, mode: str) -> tuple[list[Sample], int]:
    """Return the samples of all requests, `batch_size` at a time, and how often the mode's subject occurred."""
    batches = [asks[start : start + batch_size] for start in range(0, len(asks), batch_size)]
    samples, count = list[Sample](), 0
    timer = threading.Timer(_KILL_AFTER_S, os.kill, (llm.client.welcome.pid, signal.SIGKILL))
    for index, batch in enumerate(batches):
        prompts, params = [ask.prompt for ask in batch], [_params(ask) for ask in batch]
        others = _others(batch) if mode == "preempted" else []
        prompts, params = [*others, *prompts], [*[_OTHER_PARAMS] * len(others), *params]
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        if mode == "killed" and index == len(batches) // 2:
            timer.start()
        outputs = llm.generate(given, params, use_tqdm=False)[len(others) :]
        samples += map(_sample, batch, outputs)
        count += sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)
    timer.cancel()  # if it comes too late, no engine was killed
    if mode == "speculation":
        count = llm.statistics().num_drafts
    if mode == "killed":
        count = llm.client.welcome.epoch
    return samples, count


def _others(batch: Sequence[Ask]) -> list[list[int]]:
    """Return prompts of requests that go before a batch that generates, and leave it blocks for its beginning.

    They are older. As they grow, it is preempted, also a request that is alone in its batch.
    """
    longest = max((len(ask.prompt) for ask in batch if ask.first is None), default=0)
    blocks = _MODEL_LEN // _SMALL_BLOCK - longest // _SMALL_BLOCK - _SLACK
    length = blocks // _NUM_OTHERS * _SMALL_BLOCK
    return [[token] * length for token in batch[0].prompt[:_NUM_OTHERS]] if longest else []


def _params(ask: Ask) -> SamplingParams:
    if ask.first is None:
        return SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS, stop=UNTIL)
    return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)


def _sample(ask: Ask, output: RequestOutput) -> Sample:
    if ask.first is None:
        return Sample(ask.task.name, ask.document, None, None, output.outputs[0].text)
    assert output.prompt_logprobs is not None, "they were asked for"
    total, is_greedy = 0.0, True
    for token, entry in zip(ask.prompt[ask.first :], output.prompt_logprobs[ask.first :], strict=True):
        assert entry is not None, "only the first token has none"
        total += entry[token].logprob
        is_greedy &= max(entry, key=lambda other: entry[other].logprob) == token
    return Sample(ask.task.name, ask.document, total, is_greedy, None)


def encode(samples: Sequence[Sample]) -> bytes:
    """Return the result file: a JSON object a line, its numbers exact."""
    return b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)


def scores(result: bytes) -> dict[str, tuple[str, float]]:
    """Return each task's metric and score, from a result file."""
    samples = msgspec.json.Decoder(Sample).decode_lines(result)
    found = {}
    for task in TASKS:
        own = [sample for sample in samples if sample.task == task.name]
        found[task.name] = METRICS[task.form], _score(task, own)
    return found


def _score(task: Task, samples: Sequence[Sample]) -> float:
    if task.form == "generate_until":
        pairs = zip(samples, task.documents, strict=True)
        return sum(sample.text == document.answer for sample, document in pairs) / len(samples)
    if task.form == "loglikelihood":
        return sum(bool(sample.is_greedy) for sample in samples) / len(samples)
    sums = [sample.sum for sample in samples if sample.sum is not None]
    if task.form == "loglikelihood_rolling":
        num_words = sum(len(str(document.answer).split()) for document in task.documents)
        return math.exp(-sum(sums) / num_words)
    num_right, start = 0, 0
    for document in task.documents:
        own = sums[start : start + len(document.choices)]
        num_right += own.index(max(own)) == document.answer
        start += len(own)
    return num_right / len(task.documents)


def difference(results: Sequence[bytes]) -> str:
    """Return the first lines that differ between result files; "" = there is one result."""
    for lines in zip(*(result.splitlines() for result in results), strict=True):
        if len(set(lines)) > 1:
            return " and ".join(line.decode() for line in dict.fromkeys(lines))
    return ""


def _write(path: Path, results: Sequence[bytes]) -> None:
    for number, result in enumerate(results, 1):
        target = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            target.write_bytes(result)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror}") from None


def _print_run(run: Run, *, with_head: bool) -> None:
    if with_head:
        print(f"{'mode':12}{'batch':>6}{'seconds':>9}  {'sha256 of the result':22}")
    subject = {"speculation": "drafts", "preempted": "preemptions", "killed": "engines killed"}.get(run.mode)
    print(
        f"{run.mode:12}{run.batch_size:6}{run.seconds:9.1f}  {run.sha256:.16}"
        + (f"  {run.count} {subject}" if subject else "")
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
