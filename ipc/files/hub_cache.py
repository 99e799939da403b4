"""The models in the Hub's cache on this machine: find those that an engine can load, and remove one."""

from pathlib import Path
from typing import Any, NamedTuple

from ipc.errors import ModelFileError
from ipc.files.hub_gguf import gguf_files, quantization_of
from ipc.files.hub_name import HubName, is_hub_name, parse_hub_name
from ipc.files.model_files import resolve_model


class CachedModel(NamedTuple):
    """A model in the cache: the safetensors of a snapshot, or one of its GGUF files."""

    name: HubName
    format: str  # "safetensors" or "GGUF"
    num_bytes: int  # of all its files
    modified: float  # when its newest file was written; seconds since 1970
    path: Path  # folder or .gguf file
    files: tuple[Any, ...]  # huggingface_hub's CachedFileInfo


def cached_models() -> list[CachedModel]:
    """Return the models in the cache by name, without network access. Errors: ModelFileError."""
    return sorted((model for repo in _scan().repos for model in _models(repo)), key=lambda model: str(model.name))


def find_cached(model: str | None) -> str | None:
    """Return `model`, with a name on the Hub replaced by its path in the cache. Nothing is downloaded.

    Errors: ModelFileError for a name that is not in the cache.
    """
    if model is None or not is_hub_name(model):
        return model
    try:
        return str(resolve_model(model))  # a file or folder of that name takes precedence
    except ModelFileError:
        wanted = parse_hub_name(model)
    assert wanted is not None, model
    for cached in cached_models():
        name = cached.name
        if name.repo == wanted.repo and (name.quantization or "").lower() == (wanted.quantization or "").lower():
            return str(cached.path)
    raise ModelFileError(f"{model} is no file or folder here, and not in the cache: engine-core pull {model}")


def remove_cached(name: HubName) -> int:
    """Remove a model from the cache, and return how many bytes that freed.

    Without a quantization it is the whole repository, or the revision if one is named; with one it is this GGUF file.
    Errors: ModelFileError that lists the existing models.
    """
    cache = _scan()
    repos = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == name.repo]
    models = [model for repo in repos for model in _models(repo)]
    is_all = name.revision is None
    revisions = [
        one for repo in repos for one in repo.revisions if is_all or name.revision in (one.commit_hash, *one.refs)
    ]
    if name.quantization is None and revisions:
        return _execute(cache.delete_revisions(*(one.commit_hash for one in revisions)))
    wanted = [model for model in models if _is_same(model, name)]
    if not wanted:
        others = ", ".join(str(model.name) for model in models) or "nothing of it"
        raise ModelFileError(f"{name} is not in the cache, which has {others}; `engine-core list` shows all of them")
    if len(models) == len(wanted):  # only its README would be left
        return _execute(cache.delete_revisions(*(one.commit_hash for one in revisions)))
    if not hasattr(cache, "delete_files"):
        raise ModelFileError("removing one file needs a newer huggingface_hub: pip install -U huggingface_hub")
    return _execute(cache.delete_files(*(file for model in wanted for file in model.files)))


def _is_same(model: CachedModel, name: HubName) -> bool:
    quantization, wanted = model.name.quantization or "", (name.quantization or "").lower()
    return wanted in (quantization.lower(), model.path.name.lower()) and model.name.branch == name.branch


def _execute(strategy: Any) -> int:
    strategy.execute()
    return int(strategy.expected_freed_size)


def _scan() -> Any:
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ImportError as error:
        raise ModelFileError(f"the Hub's cache needs the package huggingface_hub ({error})") from error
    try:
        return scan_cache_dir()
    except CacheNotFound:
        return _Nothing()


class _Nothing:
    """The cache of a user who has never downloaded a model."""

    repos = ()


def _models(repo: Any) -> list[CachedModel]:
    if repo.repo_type != "model":
        return []
    found = []
    for revision in repo.revisions:
        names = sorted(revision.refs, key=lambda name: (name != "main", name))
        named = (names or [revision.commit_hash])[0]
        of_repo = HubName(repo.repo_id, None, None if named == HubName(repo.repo_id).branch else named)
        by_path = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
        ggufs = gguf_files(by_path)
        for path in ggufs:
            name = of_repo._replace(quantization=quantization_of(path))
            found.append(_model(name, "GGUF", revision.snapshot_path / path, [by_path[path]]))
        if "config.json" in by_path and any(path.endswith(".safetensors") for path in by_path):
            others = [file for path, file in by_path.items() if path not in ggufs]
            found.append(_model(of_repo, "safetensors", revision.snapshot_path, others))
    return found


def _model(name: HubName, form: str, path: Path, files: list[Any]) -> CachedModel:
    num_bytes = sum({file.blob_path: file.size_on_disk for file in files}.values())
    return CachedModel(name, form, num_bytes, max(file.blob_last_modified for file in files), path, tuple(files))
