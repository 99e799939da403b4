"""The GGUF files of a repository on the Hub: their quantizations, and which one a name means."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from ipc.errors import ModelFileError

#: The default among several files: the choice of llama.cpp and Ollama.
USUAL = "Q4_K_M"
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD[-_])?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4\w*|NVFP4\w*))$", re.I
)
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
#: Files that are not language models: image projectors, and statistics for quantization.
_OTHERS = ("mmproj", "imatrix")


def gguf_files(files: Iterable[str]) -> list[str]:
    """Return the paths of those files that are language models in GGUF, sorted."""
    named = [(PurePosixPath(file).name.lower(), file) for file in files]
    return sorted(file for name, file in named if name.endswith(".gguf") and not any(word in name for word in _OTHERS))


def quantization_of(file: str) -> str:
    """Return the quantization that a file's name states, in capitals: Q4_K_M; otherwise the name itself."""
    stem = _PART.sub("", PurePosixPath(file).name[: -len(".gguf")])
    match = _QUANTIZATION.search(stem)
    return match[1].upper() if match else PurePosixPath(file).name


def choose_gguf(files: Iterable[str], quantization: str | None, repo: str) -> str:
    """Return the GGUF file of this quantization, or with this file name; None = the default one, or the only one.

    Errors: ModelFileError that lists the existing files; also for a model that is split into several files.
    """
    known = gguf_files(files)
    if not known:
        raise ModelFileError(f"{repo} has no GGUF file for a quantization such as {quantization or USUAL}")
    found = [file for file in known if _is_meant(file, quantization or USUAL)]
    if not found and quantization is None and len({quantization_of(file) for file in known}) == 1:
        found = known
    if not found:
        what = f"has no {quantization}" if quantization else f"has no {USUAL}: name another file"
        raise ModelFileError(f"{repo} {what}; it has {_listed(known, repo)}")
    if parts := _PART.search(found[0][: -len(".gguf")]):
        raise ModelFileError(
            f"{repo}: {quantization_of(found[0])} is split into {int(parts[1])} files, which this version does not "
            f"read: join them with llama-gguf-split --merge, or use another of {_listed(known, repo)}"
        )
    if len(found) > 1:
        names = ", ".join(f"{repo}:{PurePosixPath(file).name}" for file in found)
        raise ModelFileError(f"{repo} has several files of {quantization or USUAL}: name one, {names}")
    return found[0]


def _is_meant(file: str, wanted: str) -> bool:
    kind = quantization_of(file)
    names = (PurePosixPath(file).name, kind, re.sub("^UD[-_]", "", kind))
    return wanted.lower() in [name.lower() for name in names]


def _listed(files: Iterable[str], repo: str) -> str:
    kinds = dict.fromkeys(map(quantization_of, files))
    return f"{', '.join(kinds)} (such as {repo}:{next(iter(kinds))})"
