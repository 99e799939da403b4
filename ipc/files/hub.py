"""Models by their Hugging Face names, `org/name` or `org/name@revision`: find them in the Hub's cache or download them.

Only the process that starts an engine does this. It passes the folder on, so that both processes read one snapshot. A
snapshot in the cache is used as it is, without network access; `hf download org/name` brings it up to date.
"""

import re
from pathlib import Path

from ipc.errors import ModelFileError
from ipc.files.safetensors import weight_files

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?", re.ASCII)
_TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
#: Files in folders of their own, and the copy of the weights in Mistral's own format.
_IGNORED = ["*/*", "consolidated*.safetensors"]


def is_hub_name(model: str) -> bool:
    """Return whether this can be a name on the Hub: one slash, and not a .gguf file's name."""
    return _NAME.fullmatch(model) is not None and not model.endswith(".gguf")


def hub_name(path: Path) -> str | None:
    """Return org/name of a snapshot in the Hub's cache (models--org--name/snapshots/commit); None for another path."""
    owner = path.parent.parent.name
    is_snapshot = path.parent.name == "snapshots" and owner.startswith("models--")
    return owner.removeprefix("models--").replace("--", "/") if is_snapshot else None


def fetch_model(name: str, *, with_weights: bool = True) -> Path:
    """Return the folder of a snapshot with config.json, the tokenizer's files and, with_weights, the safetensors.

    What the cache lacks is downloaded, with progress on standard error. Errors: ModelFileError that states what is
    missing in the cache, why it could not be downloaded, and what to do.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise ModelFileError(
            f"{name} is no file or folder here, and names on the Hub need the package huggingface_hub ({error}): "
            "pip install huggingface_hub, or give a folder"
        ) from error
    repo, revision = match["repo"], match["revision"]
    patterns = [*_TEXT_FILES, *(_WEIGHT_FILES if with_weights else [])]
    reason = ""
    for local_only in (True, False):
        try:
            found = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                local_files_only=local_only,
            )
        # The library passes on its HTTP client's errors, and their classes change between its versions.
        except Exception as error:
            reason = _reason(error)
            continue
        reason = _lacks(Path(found), with_weights)
        if not reason:
            return Path(found)
    raise ModelFileError(
        f"{name} is no file or folder here, not whole in the Hugging Face cache at {constants.HF_HUB_CACHE}, and could "
        f"not be downloaded: {reason}. Check the name; with a network, try again (HF_TOKEN for a private or gated "
        f"model); without one, run `hf download {repo}` on a machine that has one and copy the cache, or give a folder"
    )


def _reason(error: Exception) -> str:
    """Return the first line of the original error. The library wraps a lost connection in an error of its own."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    return f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]:.300}".rstrip(".")


def _lacks(folder: Path, with_weights: bool) -> str:
    """Return what a snapshot lacks, in words; "" if nothing. An interrupted download looks like a complete snapshot."""
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if not with_weights:
        return ""
    try:
        missing = [file.name for file in weight_files(folder) if not file.is_file()]
    except ModelFileError as error:
        return str(error)
    return f"{folder} has no {', '.join(missing[:3])}" if missing else ""
