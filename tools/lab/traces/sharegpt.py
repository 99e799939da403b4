"""ShareGPT's conversations: texts without times, measured by a tokenizer and sent at a rate."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError
from ipc.files.model_files import read_tokenizer_files
from tools.lab.traces.row import Making, Row


def is_sharegpt(beginning: bytes) -> bool:
    """Return whether a file is one JSON array of conversations."""
    return beginning.lstrip().startswith(b"[") and b'"conversations"' in beginning


def read_conversations(path: Path, num_rows: int | None, making: Making) -> list[Row]:
    """Return a request for the first question and its answer of each conversation that has both.

    Errors: ConfigError, also without a tokenizer or a rate.
    """
    if making.tokenizer is None or making.rate is None:
        raise ConfigError(f"{path} has texts without times: give --tokenizer FOLDER and --rate X (requests a second)")
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a trace that can be read: {error}") from None
    pairs = [pair for one in conversations if (pair := _first_pair(one)) is not None][:num_rows]
    tokenizer = Tokenizer.from_files(read_tokenizer_files(Path(making.tokenizer)))
    questions, answers = (tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1))
    draw = np.random.default_rng(making.seed)
    gaps = draw.gamma(making.burstiness, 1 / (making.rate * making.burstiness), len(pairs))
    return [
        Row(arrival, max(1, len(question)), max(1, len(answer)))
        for arrival, question, answer in zip(np.cumsum(gaps).tolist(), questions, answers, strict=True)
    ]


def _first_pair(conversation: Any) -> tuple[str, str] | None:
    """Return the first question and the answer to it; None: the conversation has none."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    texts = [turn.get("value") for turn in turns or () if isinstance(turn, dict)][:2]
    match texts:
        case [str(question), str(answer)] if question and answer:
            return question, answer
        case _:
            return None
