"""Models by their Hugging Face names: find them in the Hub's cache or download them, or from ModelScope.

Only the process that starts an engine does this. It passes the path on, so that both processes read one snapshot. A
snapshot in the cache is used without network access; `engine-core pull` updates it.
"""

import errno
import glob
import os
import re
import sys
from pathlib import Path
from typing import Any

from ipc.errors import ModelFileError
from ipc.files.hub_gguf import choose_gguf, gguf_files
from ipc.files.hub_name import HubName, parse_hub_name
from ipc.files.safetensors import weight_files
from ipc.files.text_files import is_text_file

#: An embedding model's way of pooling (sentence-transformers), in folders such as 1_Pooling; its longest text; its
#: prompts.
_MODULES = re.compile(r"modules\.json|\d+_\w+/config\.json|sentence_[\w-]+_config\.json")
#: Weights: not those in subfolders, and not the copy in Mistral's own format.
_WEIGHTS = re.compile(r"(?!consolidated)[^/]*\.safetensors(\.index\.json)?|\d+_\w+/model\.safetensors")


def fetch_model(text: str, *, with_weights: bool = True, is_update: bool = False) -> Path:
    """Return the folder of a snapshot with config.json, the tokenizer's files and, with_weights, the safetensors; or
    the path of a GGUF file.

    Missing files are downloaded, with progress on standard error if that is a terminal. is_update: ask the Hub even if
    the cache has it. Errors: ModelFileError that states what the cache lacks, why it could not be downloaded, and what
    to do.
    """
    name = parse_hub_name(text)
    assert name is not None, text
    if uses_modelscope():
        return _from_modelscope(name, with_weights, is_update)
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise ModelFileError(
            f"{text} is not a file or folder on this machine, and names on the Hub need the package huggingface_hub "
            f"({error}): pip install huggingface_hub, or give a folder"
        ) from error
    found, lacks = _cached(name, with_weights)
    if found is not None and not is_update:
        return found
    try:
        return _download(name, with_weights)
    except ModelFileError:
        raise
    # The library lets its HTTP client's errors through, and their classes change between its versions.
    except Exception as error:
        raise ModelFileError(explain(error, name, lacks)) from None


def _cached(name: HubName, with_weights: bool) -> tuple[Path | None, str]:
    """Return the model's path in the cache and ""; or None and what the cache lacks."""
    from huggingface_hub import constants

    home = Path(constants.HF_HUB_CACHE, "models--" + name.repo.replace("/", "--"))
    reference = home / "refs" / name.branch
    commit = reference.read_text().strip() if reference.is_file() else name.branch
    folder = home / "snapshots" / commit
    if not folder.is_dir():
        return None, f"{constants.HF_HUB_CACHE} has no {name.repo}"
    return _in_folder(folder, name, with_weights)


def _in_folder(folder: Path, name: HubName, with_weights: bool) -> tuple[Path | None, str]:
    """Return the model's path in a snapshot and ""; or None and what the snapshot lacks."""
    lacks = ""
    if name.quantization is None:
        lacks = _lacks(folder, with_weights)
        if not lacks:
            return folder, ""
    files = gguf_files(str(path.relative_to(folder)) for path in folder.rglob("*.gguf") if path.is_file())
    try:
        return folder / choose_gguf(files, name.quantization, name.repo), ""
    except ModelFileError:
        return None, lacks or f"{folder} has no {name.quantization}"


def _download(name: HubName, with_weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    # Not list_repo_files(), which tries for half a minute if there is no network.
    files = [one.rfilename for one in HfApi().model_info(name.repo, revision=name.branch).siblings or ()]
    found = snapshot_download(
        name.repo,
        revision=name.branch,
        allow_patterns=[glob.escape(file) for file in _wanted(files, name, with_weights)],
        tqdm_class=_progress_bar(),
    )
    return _complete(Path(found), name, with_weights)


def _wanted(files: list[str], name: HubName, with_weights: bool) -> list[str]:
    """Return the files of a repository that a model needs. Errors: ModelFileError for a repository without a model."""
    has_safetensors = any(file.endswith(".safetensors") and "/" not in file for file in files)
    if name.quantization is None and "config.json" in files and (has_safetensors or not with_weights):
        wanted = [file for file in files if is_text_file(file) or _MODULES.fullmatch(file)]
        return wanted + [file for file in files if with_weights and _WEIGHTS.fullmatch(file)]
    if not gguf_files(files) and name.quantization is None:
        others = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".onnx", ".h5"))]
        raise ModelFileError(
            f"{name} is not a model that runs here: it needs config.json with *.safetensors, or a .gguf file"
            + (f", and it has {', '.join(others[:3])}" if others else "")
        )
    return [choose_gguf(files, name.quantization, name.repo)]


def _complete(folder: Path, name: HubName, with_weights: bool) -> Path:
    """Return the model's path in a snapshot that was downloaded. Errors: ModelFileError."""
    found, lacks = _in_folder(folder, name, with_weights)
    if found is None:
        raise ModelFileError(f"{name} on the Hub is not complete: {lacks}")
    return found


def _progress_bar() -> Any:
    """Return the library's class of progress bars, silent if standard error is not a terminal."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,no-any-unimported,unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            is_shown = sys.stderr is not None and sys.stderr.isatty()
            options |= {} if is_shown else {"disable": True}
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

    return Bar


def _lacks(folder: Path, with_weights: bool) -> str:
    """Return what a snapshot lacks, as text; "" if nothing. An interrupted download looks like a complete snapshot."""
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if not with_weights:
        return ""
    try:
        missing = [file.name for file in weight_files(folder) if not file.is_file()]
    except ModelFileError as error:
        return str(error)
    return f"{folder} has no {', '.join(missing[:3])}" if missing else ""


# Why a model could not be downloaded from the Hub, and what to do, as text.


#: Classes of the library by name, since they move between its modules; more specific ones first.
_BY_CLASS = {
    "GatedRepoError": "the model is gated: accept its terms at {url}, then set HF_TOKEN or run `hf auth login`",
    "RepositoryNotFoundError": "the Hub has no model of this name, or it is private: check the spelling at {url}; "
    "for a private model set HF_TOKEN or run `hf auth login`",
    "RevisionNotFoundError": "the model has no revision {revision}: {url}/tree/main lists them",
    "DisabledRepoError": "the Hub has disabled the model: see {url}",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set: unset it, or run `hf download {repo}` on a machine with network "
    "access and copy the cache",
}
_BY_STATUS = {
    401: "the Hub refuses access: set HF_TOKEN to a valid token, or run `hf auth login`",
    403: "the Hub refuses access with this token: request access at {url}",
    404: "the Hub has no model of this name: check the spelling at {url}",
    429: "the Hub limits the rate of requests: try again later; with HF_TOKEN the limit is higher",
}
_NO_NETWORK = (
    "there is no connection to {endpoint}: try again, or run `hf download {repo}` on a machine with network access "
    "and copy the cache, or give a folder"
)


def explain(error: Exception, name: HubName, lacks: str) -> str:
    """Return a message about a download that failed with `error`. lacks: what the cache lacks, "" = nothing."""
    from huggingface_hub import constants

    reason = _reason(error)
    cause = _cause(error).format(
        url=f"{constants.ENDPOINT}/{name.repo}", endpoint=constants.ENDPOINT, repo=name.repo, revision=name.branch
    )
    if not lacks:
        return f"{name} is in the cache and was not updated: {cause} ({reason})"
    return f"{name} was not downloaded: {cause}. It is not a file or folder on this machine, and {lacks} ({reason})"


def _cause(error: Exception) -> str:
    chain = list(_chain(error))
    for one in chain:
        kinds = [kind.__name__ for kind in type(one).__mro__]
        for name, text in _BY_CLASS.items():
            if name in kinds:
                return text
    for one in chain:
        status = getattr(getattr(one, "response", None), "status_code", 0)
        if status in _BY_STATUS:
            return _BY_STATUS[status]
        if status >= 500:
            return "the Hub has an internal error: try again later"
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return "the disk is full: `engine-core list` shows what is in the cache, `engine-core rm` frees it"
        if isinstance(one, PermissionError):
            return "the cache cannot be written: set HF_HOME to another folder"
    is_connection = any(isinstance(one, OSError) or "Connect" in type(one).__name__ for one in chain)
    is_late = any("Timeout" in type(one).__name__ for one in chain)
    return _NO_NETWORK if is_connection or is_late else "`hf download {repo}` may say more"


def _chain(error: Exception) -> list[BaseException]:
    """Return the error and its causes, the last one first: the library wraps a lost connection."""
    found: list[BaseException] = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found[::-1]


def _reason(error: Exception) -> str:
    """Return the first line of the original error."""
    first = _chain(error)[0]
    return f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]:.300}".rstrip(".")


# Models of ModelScope. Its own library downloads them, into its own cache.

#: Variables that ask for it. The first one that is set counts.
_MODELSCOPE = ("ENGINE_CORE_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")


def uses_modelscope() -> bool:
    """Return whether names of models are names on ModelScope. Errors: ModelFileError for a variable without meaning."""
    for variable in _MODELSCOPE:
        if (value := os.environ.get(variable)) is not None:
            if value.lower() not in (*_YES, *_NO):
                raise ModelFileError(f"{variable} must be True or False; got {value!r:.80}")
            return value.lower() in _YES
    return False


def _from_modelscope(name: HubName, with_weights: bool, is_update: bool) -> Path:
    try:
        from modelscope.hub.api import HubApi
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise ModelFileError(
            f"{name} is not a file or folder on this machine, and names on ModelScope need the package modelscope "
            f"({error}): pip install modelscope, or engine-core with its extra [modelscope], or unset "
            f"{' and '.join(_MODELSCOPE)}"
        ) from error
    lacks = ""
    # The library lets the errors of its HTTP client through, and raises many of its own.
    try:
        if not is_update:
            try:
                folder = snapshot_download(name.repo, revision=name.revision, local_files_only=True)
            except Exception as error:
                lacks = f"ModelScope's cache has no {name.repo} ({_reason(error)})"
            else:
                found, lacks = _in_folder(Path(folder), name, with_weights)
                if found is not None:
                    return found
        files = [str(one["Path"]) for one in HubApi().get_model_files(name.repo, name.revision, recursive=True)]
        wanted = [glob.escape(file) for file in _wanted(files, name, with_weights)]
        folder = snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted)
        return _complete(Path(folder), name, with_weights)
    except ModelFileError:
        raise
    except Exception as error:
        failed = f"{name} was not downloaded from ModelScope" + (f", and {lacks}" if lacks else "")
        raise ModelFileError(
            f"{failed} ({_reason(error)}): check the spelling and the network; for a private model run "
            "`modelscope login`; or give a folder"
        ) from None
