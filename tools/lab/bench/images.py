"""The cost of images: times to the first token of questions about images and of texts with the same number of tokens,
turn about.

The model has SmolVLM-256M's shape and made-up weights, so its words mean nothing. Cases: "first" = the image is new;
"second" = another question about it; "second, blocks lost" = a third one, after the prefix cache was emptied; "text" =
a new text with the same number of tokens. Ratios are of medians, to "text". Times are a caller's, from the call of
generate().
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from frontend.llm import LLM
from frontend.text.prompt_forms import PromptInput
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import UInt8s
from ipc.version import NAME, VERSION

_CASES = ("first", "second", "second, blocks lost", "text")
_LETTERS = list("abcdefgh ")


class Shape(NamedTuple):
    """The sizes of a model with images, and the height and width of its images."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    longest_edge: int
    height: int = 768
    width: int = 1024


SMOLVLM_256M = Shape(
    {
        "vocab_size": 49_280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100_000,
        "max_position_embeddings": 8192,
    },
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    2048,
)


def measure_images(options: dict[str, Any], *, rounds: int, shape: Shape = SMOLVLM_256M) -> Iterator[dict[str, Any]]:
    """Yield a record for each case. options: of the engine. Errors: those of LLM."""
    times: dict[str, list[float]] = {case: [] for case in _CASES}
    rng, num_tokens = np.random.default_rng(1), 0
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        write_model(Path(folder), shape)
        own = {name: value for name, value in options.items() if name != "model"}
        given = {"max_model_len": 4096, **own, "load_format": "dummy"}
        with LLM(folder, **given) as llm:
            _ask(llm, _text(rng, 500))
            for _ in range(rounds):
                image = _image(rng, shape)
                for case, words in zip(_CASES[:3], ("What is it?", "And why?", "And where?"), strict=True):
                    if case == _CASES[2]:
                        llm.reset_prefix_cache()
                    asked: Any = {"prompt": f"<image> {words}", "multi_modal_data": {"image": image}}
                    taken, num_tokens = _ask(llm, asked)
                    times[case].append(taken)
                times["text"].append(_ask(llm, _text(rng, num_tokens))[0])
    usual = statistics.median(times["text"])
    for case in _CASES:
        median = statistics.median(times[case])
        yield {
            "engine": NAME,
            "version": VERSION,
            "workload": "images",
            "case": case,
            "dtype": options.get("dtype"),
            "rounds": rounds,
            "num_prompt_tokens": num_tokens,
            "ttft_ms": round(median * 1000, 1),
            "ratio": round(median / usual, 3),
        }


def _ask(llm: LLM, prompt: PromptInput) -> tuple[float, int]:
    """Return the seconds to the first token, and the prompt's tokens."""
    begin = time.perf_counter()
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - begin, len(output.prompt_token_ids)


def _image(rng: np.random.Generator, shape: Shape) -> UInt8s:
    coarse = rng.integers(0, 256, (shape.height // 8, shape.width // 8, 3), np.uint8)
    return np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1))


def _text(rng: np.random.Generator, num_tokens: int) -> str:
    return "".join(rng.choice(_LETTERS, num_tokens).tolist())


def write_model(folder: Path, shape: Shape) -> None:
    """Write the folder of a model with images, whose tokens are letters; without weights."""
    config = {"architectures": ["Idefics3ForConditionalGeneration"], "scale_factor": 4, "tie_word_embeddings": True}
    settings = {"size": {"longest_edge": shape.longest_edge}}
    settings |= {"max_image_size": {"longest_edge": shape.vision["image_size"]}}
    files = {
        "config.json": {**config, "text_config": dict(shape.text), "vision_config": dict(shape.vision)},
        "preprocessor_config.json": settings,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<image>", "<fake_token_around_image>", "<global-img>"])
    tokenizer.add_special_tokens([f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)])
    tokenizer.save(str(folder / "tokenizer.json"))
