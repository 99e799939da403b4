"""`engine-core embed`: print the embeddings of texts and images, one JSON object a line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.llm import LLM
from frontend.results.pooling_outputs import EmbeddingRequestOutput
from frontend.text.known_tokenizers import make_ahead
from ipc.errors import ConfigError
from ipc.params.pooling_params import PoolingParams
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.service.start import check_connect, engine_at
from tools.terminal.prompts import add_chat_options, chat_of

_encoder = msgspec.json.Encoder()


def main(arguments: Sequence[str]) -> int:
    """Embed the texts and return the exit status. Errors: ConfigError; those of LLM.embed() and embed_chats()."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    options = engine_options(parsed)
    check_connect(parsed.connect, options)
    if parsed.system is not None and parsed.prompt_name:
        raise ConfigError("--system and --prompt-name both name an instruction: leave out one of them")
    if not (parsed.texts or parsed.image):
        parser.error("there is nothing to embed: give a TEXT, --image FILE, or both")
    params = PoolingParams(dimensions=parsed.dimensions)
    texts = [text for given in parsed.texts for text in _read(given)] if parsed.texts else [None]
    if not texts:
        parser.error("there is nothing to embed: standard input has no text")
    template = options.get("chat_template") if parsed.connect is not None else None
    if parsed.connect is None and options.get("runner", "auto") == "auto":
        options["runner"] = "pooling"
    started = engine_at(parsed.connect, options, meanwhile=make_ahead)
    with started as (address, _, _), LLM(connect=address, chat_template=template) as llm:
        for text, output in zip(texts, _embedded(llm, texts, parsed, params), strict=True):
            line: dict[str, Any] = {"text": text or ""} | ({"images": parsed.image} if parsed.image else {})
            line |= {"num_tokens": len(output.prompt_token_ids), "embedding": output.outputs.embedding}
            sys.stdout.write(_encoder.encode(line).decode() + "\n")
    return 0


def _embedded(
    llm: LLM, texts: Sequence[str | None], parsed: argparse.Namespace, params: PoolingParams
) -> list[EmbeddingRequestOutput]:
    """Return the embedding of each text: of a chat if it has images or a system message, otherwise of the text alone.

    texts: None = the images alone.
    """
    name = parsed.prompt_name
    if parsed.image or parsed.system is not None:
        chats = [chat_of(text, parsed.system, parsed.image) for text in texts]
        return llm.embed_chats(chats, use_tqdm=False, pooling_params=params, prompt_name=name)
    alone = [text for text in texts if text is not None]
    return llm.embed(alone, use_tqdm=False, pooling_params=params, prompt_name=name)


def _read(given: str) -> list[str]:
    """Return the text, or for "-" the lines of standard input."""
    return [given] if given != "-" else [line for line in sys.stdin.read().splitlines() if line]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core embed",
        usage="engine-core embed [TEXT ...] [--image FILE] [--model PATH | --connect ADDR] [OPTION ...]",
        description="Print the embedding of each text as a line of JSON: text, num_tokens, embedding. With --image or "
        "--system the model's chat template writes the prompts.",
    )
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="'-' reads one text from each line of standard input; with --image there may be none",
    )
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="keep the first N numbers of each embedding; default: all"
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put the model's instruction with this name, such as query, before each text",
    )
    add_chat_options(
        parser,
        "system message before each text, which is then a message of a chat: an instruction of your own",
        "an image before each text, or alone if there is no text",
    )
    add_engine_options(parser)
    return parser
