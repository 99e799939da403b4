"""A made-up model of the usual size of a download, as a GGUF file: random 4-bit weights, the demo model's tokenizer.

Its shape is that of a 4B model of 2025: 36 layers of 2,560, 32 heads of 128 with 8 of keys and values, 9,728 in the
middle, 151,936 tokens. The vocabulary is the demo model's and merges of two of its words, so that reading it takes as
long as a real one. The answers mean nothing.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ipc.errors import ConfigError
from ipc.files.gguf import GgufValue, cut_gguf_metadata, parse_gguf_metadata
from ipc.files.model_files import resolve_model
from ipc.tables.rounding import round_up

_ALIGNMENT = 32  # bytes, of each tensor in the file
_F32, _Q4_0 = 0, 2  # tensor types of the format
_BLOCK_BYTES, _BLOCK = 18, 32  # of Q4_0: a float16 scale and 32 numbers of 4 bits
_STRIPE = 1 << 16  # blocks that are drawn; each tensor repeats them
_VALUE_TYPES: dict[type, tuple[int, str]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_STRING, _ARRAY, _INT32 = 8, 9, 5


class Shape(NamedTuple):
    """The sizes of a Llama."""

    layers: int = 36
    hidden: int = 2560
    middle: int = 9728
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 151_936
    context: int | None = None  # tokens; None = as many as the demo model's


FOUR_B = Shape()


def write_large_model(path: Path, shape: Shape = FOUR_B) -> None:
    """Write the model to `path`: the same bytes every time. Errors: ConfigError without the demo model; OSError."""
    demo = resolve_model(None)
    if demo.suffix != ".gguf":
        raise ConfigError(
            f"the made-up model takes its tokenizer from the demo model's .gguf file, which {demo} is not"
        )
    metadata = _metadata(parse_gguf_metadata(cut_gguf_metadata(demo)), shape)
    tensors = list(_tensors(shape))
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for name, value in metadata.items():
            file.write(_string(name) + _value(value))
        offset = 0
        for name, dimensions, kind in tensors:
            sizes = struct.pack(f"<{len(dimensions)}Q", *reversed(dimensions))
            file.write(_string(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", kind, offset))
            offset += round_up(_num_bytes(dimensions, kind), _ALIGNMENT)
        _pad(file)
        stripe = _stripe(shape.hidden)
        for _, dimensions, kind in tensors:
            if kind == _F32:
                file.write(np.ones(dimensions, np.float32).tobytes())
            else:
                _write_blocks(file, stripe, _num_bytes(dimensions, kind))
            _pad(file)


def _metadata(demo: dict[str, GgufValue], shape: Shape) -> dict[str, GgufValue]:
    tokens, kinds, merges = (demo[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert isinstance(merges, list)
    made = list(itertools.islice(_merges(list(map(str, tokens))), max(0, shape.tokens - len(tokens))))
    sizes = {
        "block_count": shape.layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.middle,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.tokens,
    }
    changed: dict[str, GgufValue] = {f"llama.{name}": value for name, value in sizes.items()}
    if shape.context is not None:
        changed["llama.context_length"] = shape.context
    changed["general.name"] = "made up"
    changed["tokenizer.ggml.tokens"] = [*tokens, *("".join(pair) for pair in made)][: shape.tokens]
    changed["tokenizer.ggml.token_type"] = [*kinds, *(1 for _ in made)][: shape.tokens]
    changed["tokenizer.ggml.merges"] = [*merges, *(" ".join(pair) for pair in made)]
    return demo | changed


def _merges(tokens: list[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of words whose joined text is no token yet."""
    words = [token for token in tokens if token.isascii() and token.isalpha() and len(token) > 3]
    known = set(tokens)
    for first, second in itertools.product(words, words):
        if first + second not in known:
            known.add(first + second)
            yield first, second


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield (name, dimensions outermost first, type). The head is the embedding's matrix."""
    hidden, middle = shape.hidden, shape.middle
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.tokens, hidden), _Q4_0
    for number in range(shape.layers):
        layer = f"blk.{number}."
        yield layer + "attn_norm.weight", (hidden,), _F32
        yield layer + "attn_q.weight", (queries, hidden), _Q4_0
        yield layer + "attn_k.weight", (keys, hidden), _Q4_0
        yield layer + "attn_v.weight", (keys, hidden), _Q4_0
        yield layer + "attn_output.weight", (hidden, queries), _Q4_0
        yield layer + "ffn_norm.weight", (hidden,), _F32
        yield layer + "ffn_gate.weight", (middle, hidden), _Q4_0
        yield layer + "ffn_up.weight", (middle, hidden), _Q4_0
        yield layer + "ffn_down.weight", (hidden, middle), _Q4_0
    yield "output_norm.weight", (hidden,), _F32


def _num_bytes(dimensions: tuple[int, ...], kind: int) -> int:
    count = int(np.prod(dimensions))
    return 4 * count if kind == _F32 else count // _BLOCK * _BLOCK_BYTES


def _stripe(hidden: int) -> bytes:
    """Return blocks of Q4_0 whose numbers have a deviation of about 1 / sqrt(hidden)."""
    blocks = np.random.default_rng(0).integers(0, 256, (_STRIPE, _BLOCK_BYTES), np.uint8)
    scale = np.float16(hidden**-0.5 / 4.6)  # 4.6 is the deviation of the integers from -8 to 7
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.tobytes()


def _write_blocks(file: BinaryIO, stripe: bytes, num_bytes: int) -> None:
    for begin in range(0, num_bytes, len(stripe)):
        file.write(stripe[: num_bytes - begin])


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: GgufValue) -> bytes:
    """Return a value's type and bytes. Integers of arrays are int32, others uint32."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if not isinstance(value, list):
        kind, form = _VALUE_TYPES[type(value)]
        return struct.pack("<I", kind) + struct.pack(form, value)
    if value and isinstance(value[0], str):
        return _array(_STRING, (_string(str(one)) for one in value), len(value))
    return _array(_INT32, [np.asarray(value, np.int32).tobytes()], len(value))


def _array(kind: int, parts: Iterable[bytes], count: int) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + b"".join(parts)
