"""The tokenizer files of the model that a config names, and those of its clients."""

from pathlib import Path

from ipc.files.model_files import read_chat_template, read_tokenizer_files, resolve_model
from ipc.options.config import EngineConfig


def tokenizer_files_of(config: EngineConfig) -> dict[str, bytes]:
    """Return file name -> content; {} for the fake executor without a model and for dummy weights without a tokenizer.

    Errors: ModelFileError.
    """
    if config.executor == "fake" and config.model is None:
        return {}
    is_optional = config.load_format == "dummy"
    return read_tokenizer_files(resolve_model(config.model), optional=is_optional, mmproj=config.mmproj)


def client_files_of(config: EngineConfig, source: str | None = None) -> dict[str, bytes]:
    """Return the files for clients: the tokenizer files, and the config's chat template. Errors: as above.

    source: path of tokenizer files other than the model's.
    """
    files = tokenizer_files_of(config) if source is None else read_tokenizer_files(Path(source))
    return files | read_chat_template(config.chat_template) if files else files
