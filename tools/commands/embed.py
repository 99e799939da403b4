"""`engine-core embed`: print the embeddings of texts, one JSON object a line."""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from frontend.llm import LLM
from frontend.text.known_tokenizers import make_ahead
from frontend.text.prompt_forms import PromptInput
from ipc.params.pooling_params import PoolingParams
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.service.start import check_connect, engine_at

_encoder = msgspec.json.Encoder()


def main(arguments: Sequence[str]) -> int:
    """Embed the texts and return the exit status. Errors: ConfigError; those of LLM.embed()."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    check_connect(parsed.connect, options)
    params = PoolingParams(dimensions=parsed.dimensions)
    texts: list[PromptInput] = [text for given in parsed.texts for text in _read(given)]
    if parsed.connect is None and options.get("runner", "auto") == "auto":
        options["runner"] = "pooling"
    started = engine_at(parsed.connect, options, meanwhile=make_ahead)
    with started as (address, _, _), LLM(connect=address) as llm:
        outputs = llm.embed(texts, use_tqdm=False, pooling_params=params, prompt_name=parsed.prompt_name)
        for text, output in zip(texts, outputs, strict=True):
            line = {"text": text, "num_tokens": len(output.prompt_token_ids), "embedding": output.outputs.embedding}
            sys.stdout.write(_encoder.encode(line).decode() + "\n")
    return 0


def _read(given: str) -> list[str]:
    """Return the text, or for "-" the lines of standard input."""
    return [given] if given != "-" else [line for line in sys.stdin.read().splitlines() if line]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core embed",
        usage="engine-core embed TEXT ... [--model PATH | --connect ADDR] [OPTION ...]",
        description="Print the embedding of each text as a line of JSON: text, num_tokens, embedding.",
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="'-' reads one text from each line of standard input")
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="keep the first N numbers of each embedding; default: all"
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put the model's instruction with this name, such as query, before each text",
    )
    add_engine_options(parser)
    return parser
