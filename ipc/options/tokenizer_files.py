"""tokenizer_files_of(): the tokenizer files of the model that a config names."""

from ipc.files.model_files import read_tokenizer_files, resolve_model
from ipc.options.config import EngineConfig


def tokenizer_files_of(config: EngineConfig) -> dict[str, bytes]:
    """Return file name -> content; {} for the fake executor without a model and for dummy weights without a tokenizer.

    Errors: ModelFileError.
    """
    if config.executor == "fake" and config.model is None:
        return {}
    is_optional = config.load_format == "dummy"
    return read_tokenizer_files(resolve_model(config.model), optional=is_optional, mmproj=config.mmproj)
