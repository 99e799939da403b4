"""HubName: a model's name on the Hugging Face Hub, `org/name[:QUANTIZATION][@revision]`, and that of a cached path."""

import re
from pathlib import Path
from typing import NamedTuple

from ipc.errors import ModelFileError
from ipc.files.hub_gguf import quantization_of

#: Prefixes that users of llama.cpp and Ollama write, and those of addresses copied from a browser.
_PREFIX = r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?"
_NAME = re.compile(
    _PREFIX + r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<quantization>\w[\w.-]*))?(?:@(?P<revision>[\w.][\w./-]*))?",
    re.ASCII,
)
_DEFAULT_REVISION = "main"


class HubName(NamedTuple):
    """The parts of a name.

    quantization: of a GGUF file (Q4_K_M), or the file's name; None = the safetensors, otherwise the default GGUF file.
    revision: None = none is named, which means the branch main.
    """

    repo: str
    quantization: str | None = None
    revision: str | None = None

    @property
    def branch(self) -> str:
        """Return the revision (a branch, a tag or a commit), even if none is named."""
        return self.revision or _DEFAULT_REVISION

    def __str__(self) -> str:
        quantization = "" if self.quantization is None else f":{self.quantization}"
        return self.repo + quantization + ("" if self.revision is None else f"@{self.revision}")


def parse_hub_name(text: str) -> HubName | None:
    """Return the parts of a name; None if the text is not a name.

    A name has one slash. A text that ends with .gguf is a path, unless it is a file name after a colon. Errors:
    ModelFileError for a revision that would leave the cache's folder.
    """
    match = _NAME.fullmatch(text)
    if match is None or (match["repo"].endswith(".gguf") and match["quantization"] is None):
        return None
    revision = match["revision"]
    if revision is not None and {".", ".."} & set(revision.split("/")):
        raise ModelFileError(
            f"{text!r:.200}: a revision is a branch, a tag or a commit, and must not contain '.' or '..' as a part"
        )
    return HubName(match["repo"], match["quantization"], revision)


def is_hub_name(model: str) -> bool:
    """Return whether this can be a name on the Hub. Errors: those of parse_hub_name()."""
    return parse_hub_name(model) is not None


def hub_name(path: Path) -> str | None:
    """Return the name of a snapshot in the Hub's cache, or of a GGUF file in one; None for another path.

    Snapshots are folders models--org--name/snapshots/commit; ModelScope's are models/org--name/snapshots/branch.
    """
    folder = path if path.suffix != ".gguf" else next((up for up in path.parents if _repo_of(up)), path)
    repo = _repo_of(folder)
    return repo if repo is None or folder == path else str(HubName(repo, quantization_of(path.name)))


def _repo_of(folder: Path) -> str | None:
    """Return the repository whose snapshot a folder is; None for another folder."""
    home = folder.parent.parent
    is_modelscope = home.parent.name == "models" and "--" in home.name
    if folder.parent.name != "snapshots" or not (home.name.startswith("models--") or is_modelscope):
        return None
    return home.name.removeprefix("models--").replace("--", "/")
