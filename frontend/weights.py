"""New weights for a running engine: a path, or arrays that are written to a memory file which the engine reads."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from frontend.client.call_client import CallClient
from ipc.errors import CallFailedError, InvalidRequestError, ModelFileError
from ipc.machine.memory_files import make_memory_file
from ipc.wire.weights_messages import UpdateMode, WeightsMark

if TYPE_CHECKING:  # `engine-core control` needs none of these, whose modules take two thirds of its time
    from frontend.session import EngineHandle
    from ipc.tables.arrays import UInt8s

#: A path in the engine's file system, or (name, array) pairs: NumPy arrays or torch tensors.
WeightsInput = str | os.PathLike[str] | Iterable[tuple[str, Any]]
UpdateModeName = Literal["wait", "keep", "abort"]

UPDATE_S = 600.0  # limit for reading weights, and for the requests that they wait for
_ALIGNMENT = 64
_NUMPY_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAX_NAME_CHARS = 1024


class _Tensor(NamedTuple):
    name: str
    type_name: str  # as in safetensors
    shape: tuple[int, ...]
    data: "UInt8s"  # [bytes]


class WeightMethods:
    """Methods of an engine's user that change its weights or let it sleep. The owner has an EngineHandle."""

    _engine: "EngineHandle"

    def update_weights(
        self, weights: WeightsInput, mode: UpdateModeName = "wait", timeout: float | None = None
    ) -> WeightsMark:
        """Give the running model other weights, for all clients, and return what it computes with from then on.

        weights: (name, array) pairs of all the model's tensors, with the names of its Hugging Face files, as NumPy
        arrays or torch tensors; or a path in the engine's file system: a safetensors file, a folder of them, or a
        .gguf file. mode: what happens to requests that have begun. "wait": they end with the old weights first, and
        until then none begins; "keep": they continue with the new ones, and their outputs say from which token on
        (weights_versions); "abort". Reading and packing go on next to the steps. timeout: seconds; None = 600. See
        docs/weights.md. Errors: CallFailedError for weights that do not fit the model, with which nothing changes;
        ModelFileError for arrays that cannot be weights; EngineDeadError.
        """
        return update_weights(self._engine.client, weights, mode, timeout)

    def sleep(self, level: int = 1) -> None:
        """Free memory until wake_up(): the KV cache's (level 1), and the weights' too (level 2).

        Live requests wait, and continue afterwards. Errors: CallFailedError, EngineDeadError.
        """
        self._engine.client.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Run requests again after sleep(). tags: vLLM's; "weights" alone changes nothing.

        After level 2 the weights come from update_weights(); if the engine had those of its start, it reads them again.
        Errors: CallFailedError, EngineDeadError.
        """
        wake_up(self._engine.client, tags)

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps. Errors: CallFailedError, EngineDeadError."""
        return self._engine.client.statistics().sleep_level > 0


class PushedWeights:
    """Weights that a trainer pushes tensor by tensor, as with vLLM's load_weights(), until flush() gives them over."""

    def __init__(self, client: CallClient) -> None:
        self._client = client
        self._tensors: dict[str, _Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Take copies of some tensors. The engine gets them when all are here: at the next flush().

        Errors: ModelFileError.
        """
        for name, array in weights:
            tensor = _tensor(name, array)
            self._tensors[name] = tensor._replace(data=tensor.data.copy())

    def flush(self) -> None:
        """Give the engine the tensors pushed since the last call, if there are any: all of the model's.

        Errors: those of update_weights().
        """
        tensors, self._tensors = list(self._tensors.values()), {}
        if tensors:
            _update_from(self._client, tensors, UpdateMode.WAIT, UPDATE_S)


def wake_up(client: CallClient, tags: list[str] | None = None) -> None:
    """Wake an engine up; see WeightMethods.wake_up()."""
    if tags is not None and (unknown := set(tags) - {"weights", "kv_cache"}):
        raise InvalidRequestError(f"tags are weights and kv_cache; got {sorted(map(str, unknown))}")
    if tags is not None and "kv_cache" not in tags:
        return
    weights = client.weights()
    if weights.are_gone and weights.mark.fingerprint == client.welcome.model_fingerprint:
        client.update_weights("", UpdateMode.KEEP, UPDATE_S)
    client.wake_up()


def update_weights(client: CallClient, weights: WeightsInput, mode: str, timeout: float | None = None) -> WeightsMark:
    """Give the engine other weights; see LLM.update_weights()."""
    if mode.upper() not in UpdateMode.__members__:
        raise InvalidRequestError(f"mode must be one of wait, keep, abort; got {mode!r:.80}")
    limit, which = UPDATE_S if timeout is None else timeout, UpdateMode[mode.upper()]
    if isinstance(weights, (str, os.PathLike)):
        return client.update_weights(os.path.abspath(os.path.expanduser(weights)), which, limit)
    return _update_from(client, _tensors(weights), which, limit)


def _update_from(client: CallClient, tensors: list[_Tensor], mode: UpdateMode, timeout: float) -> WeightsMark:
    if not os.path.exists(f"/proc/{client.welcome.pid}"):
        raise CallFailedError(
            "UpdateWeights: arrays are for an engine on this machine; give the path of a file on the engine's"
        )
    with _file_of(tensors) as path:
        return client.update_weights(path, mode, timeout)


def _tensors(weights: Iterable[tuple[str, Any]]) -> list[_Tensor]:
    """Return the tensors in the order given. Errors: ModelFileError for a name that comes twice, or a type."""
    found: dict[str, _Tensor] = {}
    for name, array in weights:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
            raise ModelFileError(f"a tensor's name is a str of 1 to {_MAX_NAME_CHARS} characters; got {name!r:.80}")
        if name in found:
            raise ModelFileError(f"tensor {name!r:.80} is given twice")
        found[name] = _tensor(name, array)
    if not found:
        raise ModelFileError("no weights are given: give all tensors of the model")
    return list(found.values())


def _tensor(name: str, array: Any) -> _Tensor:
    import numpy as np  # see above

    if hasattr(array, "detach"):  # torch's, whose bfloat16 NumPy does not have
        array = array.detach().to("cpu").contiguous()
        type_name = str(array.dtype).removeprefix("torch.")
        if type_name == "bfloat16":
            array = array.view(array.new_empty(0).short().dtype)
        array = array.numpy()
    else:
        array = np.ascontiguousarray(array)
        type_name = array.dtype.name
    if type_name not in _NUMPY_TYPES:
        raise ModelFileError(f"tensor {name!r:.80} has type {type_name}; supported are {', '.join(_NUMPY_TYPES)}")
    return _Tensor(name, _NUMPY_TYPES[type_name], array.shape, array.reshape(-1).view(np.uint8))


@contextmanager
def _file_of(tensors: list[_Tensor]) -> Iterator[str]:
    """Yield the path of a safetensors file with these tensors, for processes of this user on this machine.

    It has no name on any disk, and is gone when this process ends or the context does.
    """
    header, begin = dict[str, Any](), 0
    for one in tensors:
        end = begin + len(one.data)
        header[one.name] = {"dtype": one.type_name, "shape": list(one.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    fd = make_memory_file("engine-core-weights", 0)
    try:
        with open(fd, "wb", closefd=False, buffering=0) as file:
            _write(file, len(text).to_bytes(8, "little") + text)
            for one in tensors:
                _write(file, one.data.data)
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def _write(file: Any, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]
