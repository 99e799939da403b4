"""`engine-core prove`: the same prompts alone, together, preempted and from the cache, compared token by token.

It checks on this machine and with this model what numerics level L2 promises: a request's tokens do not depend on its
neighbours, on preemption or on the prefix cache. Log probabilities are compared too, bit for bit.
"""

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from frontend.llm import LLM
from frontend.results.outputs import RequestOutput
from frontend.text.prompt_forms import TokensPrompt
from ipc.params.sampling_params import SamplingParams
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.terminal.prompts import DEMO_IDS_PREFIX

_NUM_PROMPTS = 64
NUM_TOKENS = 12
_NUM_ROWS = 16
_SHORTEST, _LONGEST = 8, 72  # tokens of a prompt, without the prefix that half of them share
MODEL_LEN = 160
_SMALL_BLOCK = 4  # tokens in a block: every request needs more of them while it generates
_FIRST_ID = 100
_SPAN = 1000


class Answer(NamedTuple):
    """What a request sampled, and the log probability of each token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def main(arguments: Sequence[str]) -> int:
    """Compare, and return the exit status: 1 if anything differs. Errors: ConfigError; those of the engine."""
    parser = ArgumentParser(
        prog="engine-core prove",
        usage="engine-core prove [MODEL] [--prompts N] [OPTION ...]",
        description="Compare the answers to the same prompts alone, with others, preempted and from the prefix cache.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model; default: the demo model")
    parser.add_argument("--prompts", type=int, default=_NUM_PROMPTS, metavar="N", help="default: %(default)s")
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.prompts <= 4096:
        parser.error("--prompts must be from 1 to 4096")
    options = engine_options(parsed)
    if parsed.model_name is not None:
        options["model"] = parsed.model_name
    common = {"max_num_seqs": _NUM_ROWS, "max_model_len": MODEL_LEN, **options}
    prompts = make_prompts(parsed.prompts)
    _say("alone: each prompt by itself, nothing cached")
    with LLM(skip_tokenizer_init=True, **{**common, "enable_prefix_caching": False}) as llm:
        print(f"{llm!r}")
        alone = [answer for prompt in prompts for answer in ask_together(llm, [prompt])]
        level = llm.numerics
        _say("together: up to 16 at once, prompts in the same engine")
        results = {"together": ask_together(llm, prompts)}
    few = {**common, "num_blocks_override": few_blocks(prompts) + 1, "block_size": _SMALL_BLOCK}
    few["max_model_len"] = min(few["max_model_len"], MODEL_LEN)  # it has blocks for one request
    few.pop("kv_cache_memory_bytes", None)
    _say("preempted: KV blocks for less than half of them")
    with LLM(skip_tokenizer_init=True, **{**few, "enable_prefix_caching": False}) as llm:
        results["preempted"] = ask_together(llm, prompts)
        num_preemptions = llm.statistics().num_preemptions
    _say("cached: all of them again, with the prompts' keys and values from the prefix cache")
    with LLM(skip_tokenizer_init=True, **common) as llm:
        ask_together(llm, prompts)
        before = llm.statistics().prefix_cache_hits
        results["cached"] = ask_together(llm, prompts)
        num_hits = llm.statistics().prefix_cache_hits - before
    notes = {"preempted": f", {num_preemptions} preemptions", "cached": f", {num_hits} tokens found"}
    for name, answers in results.items():
        same = sum(one == other for one, other in zip(alone, answers, strict=True))
        print(f"{name:>10}: {same}/{len(alone)} identical bits{notes.get(name, '')}")
    if any(answers != alone for answers in results.values()):
        print(f"numerics {level}: they differ")
        return 1
    if not num_preemptions or not num_hits:
        lacking = "preempted" if not num_preemptions else "found in the prefix cache"
        print(f"nothing is proved about {lacking} requests, because there were none: give more prompts (--prompts)")
        return 1
    print(f"numerics {level}: every token and every log probability is the same")
    return 0


def few_blocks(prompts: list[list[int]]) -> int:
    """Return the KV blocks for less than half of the requests that run at once, but for each of them alone."""
    needed = sorted(-(-(len(prompt) + NUM_TOKENS) // _SMALL_BLOCK) for prompt in prompts)[-_NUM_ROWS:]
    return max(-(-MODEL_LEN // _SMALL_BLOCK), sum(needed) // 2)


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of token ids, the same at each call; every second one has a common prefix."""
    prompts = []
    for number in range(count):
        length = _SHORTEST + (number * 37) % (_LONGEST - _SHORTEST)
        own = [_FIRST_ID + (number * 131 + position * 17) % _SPAN for position in range(length)]
        prompts.append([*DEMO_IDS_PREFIX, *own] if number % 2 else own)
    return prompts


def ask_together(llm: LLM, prompts: list[list[int]]) -> list[Answer]:
    """Return the answers to prompts that are submitted at once, each with a seed of its own."""
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            temperature=0.0 if number % 4 else 0.8,
            seed=number,
        )
        for number in map(_number_of, prompts)
    ]
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [_answer(output) for output in llm.generate(given, params, use_tqdm=False)]


def _number_of(prompt: list[int]) -> int:
    """Return a number that depends only on the prompt: its seed."""
    return sum((position + 1) * token for position, token in enumerate(prompt)) % 2**31


def _answer(output: RequestOutput) -> Answer:
    choice = output.outputs[0]
    assert choice.logprobs is not None, "log probabilities were asked for"
    values = [each[token].logprob for each, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    return Answer(tuple(choice.token_ids), tuple(values))


_begin = time.monotonic()


def _say(text: str) -> None:
    print(f"engine-core: {time.monotonic() - _begin:6.1f} s  {text}", file=sys.stderr, flush=True)
