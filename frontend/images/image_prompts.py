"""ImagePrompts: the images of prompts in the form in which a model was trained: text around each, and squares of
pixels.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from frontend.images.any_size import any_size_images
from frontend.images.gemma3 import gemma3_images
from frontend.images.gemma4 import gemma4_images
from frontend.images.idefics3 import idefics3_images
from frontend.images.internvl import internvl_images
from frontend.images.lfm2_vl import lfm2_vl_images
from frontend.images.pixtral import pixtral_images
from frontend.images.processed import ProcessedImages
from frontend.images.rules import PROCESSOR_FILE, ImageRules
from frontend.images.sources import MAX_PROMPT_PIXELS, find_image, read_pixels, turn_of
from ipc.errors import InvalidRequestError, ModelFileError, PromptTooLongError, UnsupportedModelError
from ipc.log_lines import counted
from ipc.wire.feature_messages import FeatureLimits, FeatureUse, PutFeature
from ipc.wire.placed_feature import PlacedFeature

_FILES = (PROCESSOR_FILE, "processor_config.json")
#: Most squares of one prompt.
MAX_SQUARES = 512
#: Names of image processors in these files, without the suffix for their implementation -> the rules.
_PROCESSORS: dict[str, Callable[[Mapping[str, Any], FeatureLimits, Callable[[str], int | None]], ImageRules]] = {
    "Idefics3ImageProcessor": idefics3_images,
    "SmolVLMImageProcessor": idefics3_images,
    "Gemma3ImageProcessor": gemma3_images,
    "GotOcr2ImageProcessor": internvl_images,
    "Gemma4ImageProcessor": gemma4_images,
    "Lfm2VlImageProcessor": lfm2_vl_images,
    "PixtralImageProcessor": pixtral_images,
    "Qwen2VLImageProcessor": any_size_images,
    "Qwen3VLImageProcessor": any_size_images,
}


class ImageText(NamedTuple):
    """A prompt's text with all its images' marks, and the squares for these, in order."""

    text: str
    squares: list[tuple[bytes, PutFeature]]
    rules: ImageRules
    #: For each square, the index of its first row token among the text's, and the number of tokens that it replaces.
    #: Some row tokens may belong to no image, because a user wrote them.
    runs: list[tuple[int, int]]
    num_tokens: int

    def place(self, token_ids: Sequence[int]) -> list[PlacedFeature]:
        """Return the features at their positions in the text's tokens."""
        places = [at for at, token in enumerate(token_ids) if token == self.rules.mark_id]
        if len(places) != self.num_tokens:
            raise InvalidRequestError(
                f"the prompt has {counted(len(places), 'token')} for images, but its text has "
                f"{counted(self.num_tokens, 'time')} {self.rules.token}: write {self.rules.mark} once for each image"
            )
        return [
            PlacedFeature(FeatureUse(places[first], size, digest), feature)
            for (first, size), (digest, feature) in zip(self.runs, self.squares, strict=True)
        ]


class ImagePrompts:
    """The processor of one model's images. max_images: of one prompt; None = no limit."""

    def __init__(self, rules: ImageRules, max_images: int | None = None) -> None:
        self.rules, self.mark, self._max_images = rules, rules.mark, max_images
        self._images = ProcessedImages(rules)

    def read(
        self,
        text: str,
        images: Sequence[Any],
        name: str,
        marks: Sequence[int] | None = None,
        max_bytes: int | None = None,
        *,
        most_tokens: int | None = None,
    ) -> ImageText:
        """Return a prompt's text with the marks of its images written out, and their squares.

        text: has the mark for each image. marks: indices of the text's marks that are images, ascending; the others are
        text. None = all are. name: of the prompt, for errors. max_bytes: of all squares; None = no limit. most_tokens:
        of a prompt; None = no limit. Errors: InvalidRequestError; UnsupportedParameterError without Pillow.
        """
        if self._max_images is not None and len(images) > self._max_images:
            raise InvalidRequestError(
                f"{name} has {counted(len(images), 'image')}; this engine takes at most {self._max_images} "
                "(limit_mm_per_prompt)"
            )
        parts = self._between(text, marks)
        if len(parts) - 1 != len(images):
            raise InvalidRequestError(
                f"{name} has {self.mark} {counted(len(parts) - 1, 'time')} but {counted(len(images), 'image')}: "
                "write it once for each"
            )
        written, squares, num_pixels, num_bytes = [parts[0]], list[tuple[bytes, PutFeature]](), 0, 0
        runs, num_tokens = list[tuple[int, int]](), parts[0].count(self.rules.token)
        for image, following in zip(images, parts[1:], strict=True):
            found = find_image(image, name)
            num_pixels += found.width * found.height
            if num_pixels > MAX_PROMPT_PIXELS:
                raise InvalidRequestError(f"{name}: its images have more than {MAX_PROMPT_PIXELS} pixels together")
            with turn_of(found):
                made = self._images.of(read_pixels(found, image, name))
            del found  # frees its pixels: the next image may also be large
            squares += made.squares
            num_bytes += sum(len(feature.data) for _, feature in made.squares)
            if max_bytes is not None and num_bytes > max_bytes:
                raise InvalidRequestError(
                    f"{name}: its images take more than {max_bytes} bytes as squares: send fewer of them"
                )
            last = made.squares[-1][1].shape
            written += [self.rules.text_of(made.num_rows, made.num_columns, last), following]
            for _, feature in made.squares:
                runs.append((num_tokens, self.rules.rows_of(feature.shape)))
                num_tokens += self.rules.marks_of(feature.shape)
            num_tokens += following.count(self.rules.token)
            if most_tokens is not None and num_tokens > most_tokens:  # the other images are not read for that
                raise PromptTooLongError(
                    f"{name}: the tokens of its images are more than {most_tokens}: send fewer, or smaller ones"
                )
            if len(squares) > MAX_SQUARES:
                raise InvalidRequestError(
                    f"{name}: its images have more than {MAX_SQUARES} squares: send fewer of them"
                )
        return ImageText("".join(written), squares, self.rules, runs, num_tokens)

    def _between(self, text: str, marks: Sequence[int] | None) -> list[str]:
        """Return the text before, between and after the images."""
        parts = text.split(self.mark)
        if marks is None:
            return parts
        ends = [0, *(mark + 1 for mark in marks), len(parts)]
        return [self.mark.join(parts[begin:end]) for begin, end in itertools.pairwise(ends)]


def image_prompts(
    files: Mapping[str, bytes], limits: FeatureLimits | None, token_id: Callable[[str], int | None]
) -> ImagePrompts | None:
    """Return the processor that a model's files describe; None if the engine takes no images.

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
    return ImagePrompts(_PROCESSORS[kind](settings, limits, token_id), limits.max_images)


def _read(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{name}: expected a JSON object: {error}") from None
