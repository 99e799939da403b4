"""ImagePrompts: the images of prompts, as a model was trained on them: text around each, and squares of pixels."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from frontend.images.processed import ProcessedImage, ProcessedImages
from frontend.images.sources import MAX_PROMPT_PIXELS, open_image
from ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.feature_messages import FeatureLimits, FeatureUse, PutFeature
from ipc.placed_feature import PlacedFeature

#: The marks in the prompts of Idefics3 and SmolVLM.
IMAGE_MARK = "<image>"
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_FILES = ("preprocessor_config.json", "processor_config.json")
#: Most squares of one prompt.
MAX_SQUARES = 512
_LANCZOS = 1  # of Pillow
_PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")


class ImageSettings(NamedTuple):
    """How a model's files say that images are prepared."""

    longest_edge: int  # to which an image's longer side is resized, pixels
    square: int  # side of the squares that the vision encoder reads, pixels
    splits: bool  # an image is cut into squares, and then comes once more as a whole
    rows_per_square: int  # tokens that stand for a square
    mark_id: int  # the token of IMAGE_MARK


class ImageText(NamedTuple):
    """A prompt's text with all its images' marks, and the squares that these stand for, one after the other."""

    text: str
    squares: list[tuple[bytes, PutFeature]]
    settings: ImageSettings

    def place(self, token_ids: Sequence[int]) -> list[PlacedFeature]:
        """Return the features at their places in the text's tokens."""
        size, mark = self.settings.rows_per_square, self.settings.mark_id
        places = [at for at, token in enumerate(token_ids) if token == mark]
        if len(places) != size * len(self.squares):
            raise InvalidRequestError(
                f"the prompt has {len(places)} tokens for images, and its images have {size * len(self.squares)}: "
                f"write {IMAGE_MARK} once for each image, and nowhere else"
            )
        return [
            PlacedFeature(FeatureUse(places[size * index], size, digest), feature)
            for index, (digest, feature) in enumerate(self.squares)
        ]


class ImagePrompts:
    """The processor of one model's images."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self._images = ProcessedImages(settings)

    def read(self, text: str, images: Sequence[Any], name: str) -> ImageText:
        """Return a prompt's text with the marks of its images written out, and their squares.

        text: has IMAGE_MARK for each image. name: of the prompt, for errors. Errors: InvalidRequestError;
        UnsupportedParameterError without Pillow.
        """
        parts = text.split(IMAGE_MARK)
        if len(parts) - 1 != len(images):
            raise InvalidRequestError(
                f"{name} has {IMAGE_MARK} {len(parts) - 1} times and {len(images)} images: write it once for each"
            )
        written, squares, num_pixels = [parts[0]], list[tuple[bytes, PutFeature]](), 0
        for image, following in zip(images, parts[1:], strict=True):
            opened = open_image(image, name)
            num_pixels += opened.width * opened.height
            if num_pixels > MAX_PROMPT_PIXELS:
                raise InvalidRequestError(f"{name}: its images have more than {MAX_PROMPT_PIXELS} pixels together")
            made = self._images.of(opened)
            squares += made.squares
            written += [self._marks(made), following]
            if len(squares) > MAX_SQUARES:
                raise InvalidRequestError(
                    f"{name}: its images have more than {MAX_SQUARES} squares: send fewer of them"
                )
        return ImageText("".join(written), squares, self.settings)

    def _marks(self, image: ProcessedImage) -> str:
        """Return what stands in the prompt for one image."""
        marks = IMAGE_MARK * self.settings.rows_per_square
        text = ""
        for row in range(image.num_rows):
            for column in range(image.num_columns):
                text += f"{_AROUND}<row_{row + 1}_col_{column + 1}>{marks}"
            text += "\n"
        return f"{text}\n{_AROUND}{_WHOLE}{marks}{_AROUND}" if text else f"{_AROUND}{_WHOLE}{marks}{_AROUND}"


def image_prompts(files: Mapping[str, bytes], limits: FeatureLimits | None, mark_id: int | None) -> ImagePrompts | None:
    """Return the processor that a model's files describe; None where the engine takes no images.

    mark_id: the tokenizer's id of IMAGE_MARK. Errors: ModelFileError, UnsupportedModelError.
    """
    if limits is None or not limits.image_size:
        return None
    settings: dict[str, Any] = {}
    for name in reversed(_FILES):
        if name in files:
            own = _read(files[name], name)
            settings |= own.get("image_processor") or {} if "image_processor" in own else own
    kind = str(settings.get("image_processor_type", _PROCESSORS[0])).removesuffix("Fast").removesuffix("Pil")
    if kind not in _PROCESSORS:
        raise UnsupportedModelError(f"image_processor_type={kind!r} is not supported: {' and '.join(_PROCESSORS)} are")
    for key, only in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", _LANCZOS)):
        if settings.get(key, only) != only:
            raise UnsupportedModelError(f"{_FILES[0]}: {key}={settings[key]!r} is not supported: only {only!r} is")
    square = _edge(settings, "max_image_size", 364)
    if square != limits.image_size:
        raise ModelFileError(
            f"{_FILES[0]}: max_image_size is {square}, and the vision encoder reads squares of {limits.image_size}"
        )
    if mark_id is None:
        raise ModelFileError(f"tokenizer.json has no token {IMAGE_MARK}")
    longest = _edge(settings, "size", 4 * 364)
    splits = bool(settings.get("do_image_splitting", True))
    return ImagePrompts(ImageSettings(longest, square, splits, limits.image_rows, mark_id))


def _read(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{name}: expected a JSON object: {error}") from None


def _edge(settings: Mapping[str, Any], key: str, default: int) -> int:
    size = settings.get(key, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    if isinstance(edge, bool) or not isinstance(edge, int) or not 1 <= edge <= 1 << 14:
        raise ModelFileError(f"{_FILES[0]}: {key} must be {{'longest_edge': pixels}}, got {size!r:.80}")
    return edge
