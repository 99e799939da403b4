"""Images become the squares that transformers makes of them, pixel for pixel; and what is read as an image."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from frontend.images import sources
from frontend.images.chat_images import IMAGE_PART, has_images, take_images
from frontend.images.idefics3 import Idefics3Images
from frontend.images.image_prompts import ImagePrompts, image_prompts
from frontend.images.processed import ProcessedImages
from frontend.images.sources import image_bytes
from ipc.errors import InvalidRequestError, ModelFileError, PromptTooLongError, UnsupportedModelError
from ipc.wire.feature_messages import FeatureLimits
from ipc.wire.placed_feature import PlacedFeature
from tests.core.models.idefics3_checkpoint import LONGEST, ROWS, SQUARE, noise, processed, tiny_tokenizer
from tests.frontend.images.opened import open_image
from tests.placed_images import placed_image

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

LIMITS = FeatureLimits(48, 1 << 20, SQUARE, ROWS)
RULES = Idefics3Images(longest_edge=LONGEST, square=SQUARE, splits=True, rows_per_square=ROWS, mark_id=1)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", [(100, 150), (64, 64), (200, 60), (7, 300), (333, 500), (1, 1), (191, 193)])
def test_squares_are_those_of_transformers(size: tuple[int, int], splits: bool) -> None:
    pixels = noise(*size, 1)
    theirs = processed(pixels, do_image_splitting=splits)
    got = replace(RULES, splits=splits).squares_of(Image.fromarray(pixels))
    ours = [((one * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5) for one in got.pixels]
    assert np.array_equal(np.stack(ours).transpose(0, 3, 1, 2), np.asarray(theirs["pixel_values"])[0])
    assert (got.num_rows, got.num_columns) == (theirs["rows"][0][0], theirs["cols"][0][0])


@pytest.mark.parametrize("size", [(100, 150), (64, 64)])
def test_a_prompt_has_the_marks_that_transformers_writes(size: tuple[int, int]) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    pixels = noise(*size, 1)
    theirs = processed(pixels)
    marks = get_image_prompt_string(
        theirs["rows"][0][0], theirs["cols"][0][0], ROWS, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    read = ImagePrompts(RULES).read("What is <image> this?", [pixels], "the prompt")
    assert read.text == f"What is {marks} this?"
    mark = tiny_tokenizer().token_to_id("<image>")
    ids = tiny_tokenizer().encode(read.text).ids
    placed = read._replace(rules=replace(RULES, mark_id=mark)).place(ids)
    covered = [at for one in placed for at in range(one.use.position, one.use.position + one.use.num_rows)]
    assert covered == [at for at, token in enumerate(ids) if token == mark]
    assert len(placed) == len(read.squares) > 0
    assert [one.use.digest for one in placed] == [placed_image(_pixels(one), 0, 0).use.digest for one in placed]


def _pixels(placed: PlacedFeature) -> npt.NDArray[np.uint8]:
    return np.frombuffer(placed.feature.data, np.uint8).reshape(placed.feature.shape)


def test_an_image_is_processed_once_while_there_is_room() -> None:
    size = 7 * SQUARE * SQUARE * 3  # of an image of 100 x 150
    images = ProcessedImages(RULES, 2 * size)
    first = [images.of(Image.fromarray(noise(100, 150, number))) for number in (1, 2, 1, 3, 1, 2)]
    assert images.num_made == 4  # 2 gave way to 3, since 1 was used after it
    assert first[0] is first[2] is first[4]
    assert first[1] is not first[5]
    assert first[1] == first[5]
    turned = Image.fromarray(np.ascontiguousarray(noise(100, 150, 1).reshape(150, 100, 3)))
    assert images.of(turned) != first[0]  # the same bytes in another shape


@pytest.mark.parametrize("text", ["no mark", "<image><image>"])
def test_as_many_marks_as_images(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="times but 1 image: write it once for each"):
        ImagePrompts(RULES).read(text, [noise(9, 9, 1)], "the prompt")


def test_an_operator_limits_the_images_of_a_prompt() -> None:
    prompts, pixels = ImagePrompts(RULES, max_images=1), noise(64, 64, 1)
    assert prompts.read("<image>", [pixels], "the prompt").squares
    text = r"the prompt has 2 images; this engine takes at most 1 \(limit_mm_per_prompt\)"
    with pytest.raises(InvalidRequestError, match=text):
        prompts.read("<image><image>", [pixels, pixels], "the prompt")


def test_images_that_cannot_fit_are_not_read() -> None:
    """The third one is no image, and the prompt is too long after the second one or after the first."""
    prompts, given = ImagePrompts(RULES), [noise(64, 64, 1), noise(64, 64, 2), b"no image"]
    of_two = prompts.read("<image>" * 2, given[:2], "the prompt").num_tokens
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        prompts.read("<image>" * 3, given, "the prompt", most_tokens=of_two)
    for most in (of_two - 1, ROWS - 1):
        with pytest.raises(PromptTooLongError, match=f"the prompt: the tokens of its images are more than {most}"):
            prompts.read("<image>" * 3, given, "the prompt", most_tokens=most)


def test_every_form_of_an_image(tmp_path: Path) -> None:
    pixels = noise(20, 30, 2)
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = buffer.getvalue()
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (pixels, image, data, bytearray(data), str(tmp_path / "a.png"), tmp_path / "a.png", url):
        assert np.array_equal(np.asarray(open_image(source, "x")), pixels)


def test_palettes_transparency_and_turned_photographs() -> None:
    pixels = noise(20, 30, 2)
    image = Image.fromarray(pixels)
    assert open_image(image.convert("P"), "x").mode == "RGB"
    assert open_image(image.convert("RGBA"), "x").mode == "RGB"
    assert open_image(image.convert("L"), "x").mode == "RGB"
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    assert open_image(buffer.getvalue(), "x").size == (20, 30)


WRONG: list[tuple[Any, str]] = [
    (3, "an image must be a path, .* got int"),
    (b"no image", "cannot be read: cannot identify"),
    ("/no/such/file.png", "cannot be read: .*No such file"),
    ("https://example.org/a.png", "no URL is fetched"),
    (np.zeros((4, 4), np.uint8), r"must be \[height, width, 3\] of uint8; got \[4, 4\]"),
    (np.zeros((4, 4, 3)), "of float64"),
    ("data:image/png;base64,!!", "is not base64"),
    ("data:image/png,abc", "must be in base64"),
]


@pytest.mark.parametrize(("source", "text"), WRONG)
def test_what_is_no_image(source: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        open_image(source, "the prompt")


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PIXELS", 100)
    with pytest.raises(InvalidRequestError, match="20 x 10 pixels; at most 100"):
        open_image(noise(10, 20, 1), "x")
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 30)
    (tmp_path / "a.png").write_bytes(bytes(31))
    for source in (str(tmp_path / "a.png"), "data:image/png;base64," + "A" * 48):
        with pytest.raises(InvalidRequestError, match="has at most 30 bytes"):
            open_image(source, "x")


def test_images_of_a_chat() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"file").decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": "a"},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "file:///a%20b.png"}},
    ]
    read, images = take_images(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}], takes_files=True
    )
    assert read[0]["content"] == [IMAGE_PART, {"type": "text", "text": "a"}, IMAGE_PART, IMAGE_PART, IMAGE_PART]
    assert images == [b"file", b"file", "a.png", "/a b.png"]
    assert parts[0]["type"] == "image_url"  # the caller's own
    assert take_images("no chat", takes_files=True) == ("no chat", [])
    assert has_images([{"role": "user", "content": parts}])
    assert not has_images([{"role": "user", "content": [{"type": "text", "text": "a"}]}, "no message", {"content": 3}])


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "https://example.org/a.png"])
def test_a_servers_client_names_no_files(url: str) -> None:
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": url}):
        with pytest.raises(InvalidRequestError, match="must be data:image/"):
            take_images([{"role": "user", "content": [part]}], takes_files=False)
    with pytest.raises(InvalidRequestError, match="an image must be"):
        take_images([{"role": "user", "content": [{"type": "image", "image": 3}]}], takes_files=False)


def test_a_models_files() -> None:
    file = b'{"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}, "do_image_splitting": false}'
    made = image_prompts({"preprocessor_config.json": file}, LIMITS, lambda _: 7)
    assert made is not None
    assert made.rules == Idefics3Images(longest_edge=192, square=64, splits=False, rows_per_square=ROWS, mark_id=7)
    assert image_prompts({"preprocessor_config.json": file}, None, lambda _: 7) is None
    wrong: list[tuple[bytes, int | None, type[Exception], str]] = [
        (b"[]", 7, ModelFileError, "expected a JSON object"),
        (b'{"max_image_size": {"longest_edge": 32}}', 7, ModelFileError, "reads squares of 64"),
        (b'{"max_image_size": 3}', 7, ModelFileError, "max_image_size must be"),
        (b'{"resample": 3}', 7, UnsupportedModelError, "resample=3"),
        (b'{"image_processor_type": "CLIPImageProcessor"}', 7, UnsupportedModelError, "'CLIPImageProcessor'"),
        (file, None, ModelFileError, "has no token <image>"),
    ]
    for data, mark, error, text in wrong:
        with pytest.raises(error, match=text):
            image_prompts({"preprocessor_config.json": data}, LIMITS, lambda _, mark=mark: mark)


def test_a_data_url() -> None:
    assert image_bytes("data:image/png;base64," + base64.b64encode(b"abc").decode(), "x") == b"abc"
