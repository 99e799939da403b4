"""ImagePrompts: the images of prompts, as a model was trained on them: text around each, and squares of pixels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from frontend.images.gemma3 import gemma3_images
from frontend.images.idefics3 import idefics3_images
from frontend.images.processed import ProcessedImages
from frontend.images.rules import PROCESSOR_FILE, ImageRules
from frontend.images.sources import MAX_PROMPT_PIXELS, open_image
from ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.wire.feature_messages import FeatureLimits, FeatureUse, PutFeature
from ipc.wire.placed_feature import PlacedFeature

_FILES = (PROCESSOR_FILE, "processor_config.json")
#: Most squares of one prompt.
MAX_SQUARES = 512
#: Names of image processors in these files, without what says how they are implemented -> the rules.
_PROCESSORS: dict[str, Callable[[Mapping[str, Any], FeatureLimits, Callable[[str], int | None]], ImageRules]] = {
    "Idefics3ImageProcessor": idefics3_images,
    "SmolVLMImageProcessor": idefics3_images,
    "Gemma3ImageProcessor": gemma3_images,
}


class ImageText(NamedTuple):
    """A prompt's text with all its images' marks, and the squares that these stand for, one after the other."""

    text: str
    squares: list[tuple[bytes, PutFeature]]
    rules: ImageRules

    def place(self, token_ids: Sequence[int]) -> list[PlacedFeature]:
        """Return the features at their places in the text's tokens."""
        size, mark = self.rules.rows_per_square, self.rules.mark_id
        places = [at for at, token in enumerate(token_ids) if token == mark]
        if len(places) != size * len(self.squares):
            raise InvalidRequestError(
                f"the prompt has {len(places)} tokens for images, and its images have {size * len(self.squares)}: "
                f"write {self.rules.mark} once for each image, and nowhere else"
            )
        return [
            PlacedFeature(FeatureUse(places[size * index], size, digest), feature)
            for index, (digest, feature) in enumerate(self.squares)
        ]


class ImagePrompts:
    """The processor of one model's images."""

    def __init__(self, rules: ImageRules) -> None:
        self.rules, self.mark = rules, rules.mark
        self._images = ProcessedImages(rules)

    def read(self, text: str, images: Sequence[Any], name: str) -> ImageText:
        """Return a prompt's text with the marks of its images written out, and their squares.

        text: has the mark for each image. name: of the prompt, for errors. Errors: InvalidRequestError;
        UnsupportedParameterError without Pillow.
        """
        parts = text.split(self.mark)
        if len(parts) - 1 != len(images):
            raise InvalidRequestError(
                f"{name} has {self.mark} {len(parts) - 1} times and {len(images)} images: write it once for each"
            )
        written, squares, num_pixels = [parts[0]], list[tuple[bytes, PutFeature]](), 0
        for image, following in zip(images, parts[1:], strict=True):
            opened = open_image(image, name)
            num_pixels += opened.width * opened.height
            if num_pixels > MAX_PROMPT_PIXELS:
                raise InvalidRequestError(f"{name}: its images have more than {MAX_PROMPT_PIXELS} pixels together")
            made = self._images.of(opened)
            squares += made.squares
            written += [self.rules.text_of(made.num_rows, made.num_columns), following]
            if len(squares) > MAX_SQUARES:
                raise InvalidRequestError(
                    f"{name}: its images have more than {MAX_SQUARES} squares: send fewer of them"
                )
        return ImageText("".join(written), squares, self.rules)


def image_prompts(
    files: Mapping[str, bytes], limits: FeatureLimits | None, token_id: Callable[[str], int | None]
) -> ImagePrompts | None:
    """Return the processor that a model's files describe; None where the engine takes no images.

    token_id: the tokenizer's. Errors: ModelFileError, UnsupportedModelError.
    """
    if limits is None or not limits.image_size:
        return None
    settings: dict[str, Any] = {}
    for name in reversed(_FILES):
        if name in files:
            own = _read(files[name], name)
            settings |= own.get("image_processor") or {} if "image_processor" in own else own
    kind = str(settings.get("image_processor_type", "Idefics3ImageProcessor")).removesuffix("Fast").removesuffix("Pil")
    if kind not in _PROCESSORS:
        raise UnsupportedModelError(f"image_processor_type={kind!r} is not supported: {', '.join(_PROCESSORS)} are")
    return ImagePrompts(_PROCESSORS[kind](settings, limits, token_id))


def _read(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{name}: expected a JSON object: {error}") from None
