"""GivenFeatures: the images and embeddings that a caller of `verify` names, in the form in which a model reads them."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from frontend.http.openai.prompt_embeds import read_matrix
from ipc.errors import ConfigError, InvalidRequestError
from ipc.wire.feature_messages import FeatureUse, PutFeature
from ipc.wire.placed_feature import placed_embeds
from tools.commands.verify.local_engine import LocalEngine

IMAGE_FLAG, EMBEDS_FLAG = "--image", "--prompt-embeds"


class MissingFeaturesError(Exception):
    """Features of a request were not given. is_other: a file was given that is not of any request of the engine."""

    def __init__(self, text: str, *, is_other: bool) -> None:
        super().__init__(text)
        self.is_other = is_other


class FeatureFiles(NamedTuple):
    """Paths of images, and of embeddings of prompts."""

    images: Sequence[str] = ()
    embeds: Sequence[str] = ()


NO_FILES = FeatureFiles()


class GivenFeatures:
    """The features of some files by digest, for one engine.

    used: digests of the features of all requests that are verified with this engine. Errors: ConfigError for a file
    that this engine's model does not read.
    """

    def __init__(self, engine: LocalEngine, files: FeatureFiles, used: AbstractSet[bytes]) -> None:
        self._by_digest: dict[bytes, PutFeature] = {}
        self._others: list[str] = []  # files with anything that no request has
        for flag, paths, read in ((IMAGE_FLAG, files.images, _squares_of), (EMBEDS_FLAG, files.embeds, _rows_of)):
            for path in paths:
                try:
                    found = read(engine, path)
                except (InvalidRequestError, OSError) as error:
                    raise ConfigError(f"{flag} {path:.200}: {error}") from None
                self._by_digest |= found
                if found.keys() - used:
                    self._others.append(path)

    def of(self, uses: Sequence[FeatureUse]) -> list[PutFeature]:
        """Return the features of a request. Errors: MissingFeaturesError."""
        missing = [use for use in uses if use.digest not in self._by_digest]
        if not missing:
            return [self._by_digest[use.digest] for use in uses]
        first, others = missing[0], len(missing) - 1
        text = (
            f"the image or the embeddings of its tokens {first.position} to {first.position + first.num_rows - 1} "
            f"(digest {first.digest.hex():.16}){f' and {others} more' * (others > 0)} are missing: name their files "
            f"with {IMAGE_FLAG} or {EMBEDS_FLAG}"
        )
        if self._others:
            text = f"{text}; what was given is not in it: {', '.join(self._others):.400}"
        raise MissingFeaturesError(text, is_other=bool(self._others))


def _squares_of(engine: LocalEngine, path: str) -> dict[bytes, PutFeature]:
    """Return an image as the model's client makes it. Errors: InvalidRequestError."""
    if engine.images is None:
        raise InvalidRequestError("the model takes no images")
    return dict(engine.images.read(engine.images.mark, [path], "the image").squares)


def _rows_of(engine: LocalEngine, path: str) -> dict[bytes, PutFeature]:
    """Return the embeddings of a prompt. Errors: InvalidRequestError, OSError."""
    limits = engine.feature_limits
    if limits is None:
        raise InvalidRequestError("the model takes no embeddings")
    rows = read_matrix(Path(path).read_bytes(), limits.max_bytes)
    return {one.use.digest: one.feature for one in placed_embeds(rows)}
