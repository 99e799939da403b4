"""`engine-core pull`: download models from the Hugging Face Hub, or update the cached copies."""

import os
from collections.abc import Sequence

from ipc.errors import ConfigError
from ipc.files.hub import fetch_model
from ipc.files.hub_name import is_hub_name
from tools.commands.list import bytes_in_words
from tools.flags.options import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Download the models, and return the exit status. Errors: ConfigError; ModelFileError for the first model that
    fails.
    """
    parser = ArgumentParser(
        prog="engine-core pull",
        usage="engine-core pull MODEL ... [--quiet]",
        description="Download models from the Hugging Face Hub into its cache on this machine, or update the cached "
        "copies.",
        epilog="HF_TOKEN gives access to private and gated models, HF_HOME sets the cache folder, HF_ENDPOINT another "
        "Hub. ENGINE_CORE_USE_MODELSCOPE=1 takes ModelScope.",
    )
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="org/name, org/name@revision, or org/name:Q4_K_M for a GGUF file"
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress, and no path at the end")
    parsed = parser.parse_args(arguments)
    for model in parsed.models:
        if not is_hub_name(model):
            raise ConfigError(
                f"{model!r:.200} is not a name on the Hub: use org/name, org/name@revision or org/name:Q4_K_M"
            )
    if parsed.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read by huggingface_hub when it is imported
    for model in parsed.models:
        path = fetch_model(model, is_update=True)
        if not parsed.quiet:
            files = [path] if path.is_file() else list(path.rglob("*"))
            print(f"{model}  {bytes_in_words(sum(file.stat().st_size for file in files if file.is_file()))}  {path}")
    return 0
