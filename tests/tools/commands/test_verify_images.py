"""`engine-core verify` of prompts with images and embeddings: they are given to it, and one other pixel is found."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from frontend.llm import LLM
from frontend.results.outputs import RequestOutput
from ipc.errors import ConfigError
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import Contents, Header, Receipt, UsedFeature, digest_of
from tests.core.models.idefics3_checkpoint import noise, write_checkpoint
from tests.frontend.http.caller import serving
from tests.tools.commands.test_verify import contents_of, first_difference, found, run, write_model
from tools.commands.verify.__main__ import Verdict, verify_receipts
from tools.commands.verify.given_features import FeatureFiles
from tools.commands.verify.sources import Named

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(64, 64, 2), noise(200, 60, 3)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 100, "threads": 1}
WIDTH = 48
ROWS = np.random.default_rng(5).standard_normal((9, WIDTH)).astype(np.float32)
SAMPLED = SamplingParams(temperature=1.5, max_tokens=12, seed=3, n=2, repetition_penalty=1.2)
GREEDY = SamplingParams(temperature=0, max_tokens=10)


class Site(NamedTuple):
    """A model that reads images, receipts of its answers, and the files.

    receipts: of one image, another, two, and embeddings. flipped: the second image with one other pixel; truth: the
    answer to it. capture: of all of these.
    """

    model: str
    receipts: list[Receipt]
    files: list[str]
    embeds: str
    flipped: str
    truth: RequestOutput
    capture: Path


def asked(*images: Any) -> dict[str, Any]:
    marks = " and ".join(["<image>"] * len(images))
    return {"prompt": f"What is {marks} here?", "multi_modal_data": {"image": list(images)}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("images")
    model = folder / "model"
    model.mkdir()
    write_checkpoint(model)
    files = [str(folder / f"{index}.png") for index in range(len(IMAGES))]
    for image, path in zip(IMAGES, files, strict=True):
        Image.fromarray(image).save(path)
    embeds = str(folder / "rows.npy")
    np.save(embeds, ROWS)
    flipped = str(folder / "flipped.png")
    changed = IMAGES[1].copy()
    changed[40, 30] ^= 255
    Image.fromarray(changed).save(flipped)
    images: list[Any] = [asked(IMAGES[0]), asked(files[1]), asked(*IMAGES[:2]), {"prompt_embeds": ROWS}, asked(flipped)]
    capture = folder / "run.cap"
    with LLM(str(model), **OPTIONS, capture=str(capture)) as llm:
        *outputs, truth = llm.generate(images, [SAMPLED, GREEDY, GREEDY, SAMPLED, GREEDY], use_tqdm=False)
        receipts = [llm.receipt(one) for one in outputs]
    return Site(str(model), receipts, files, embeds, flipped, truth, capture)


def verdicts(site: Site, receipts: Sequence[Receipt], images: Sequence[str], embeds: Sequence[str] = ()) -> list[Any]:
    named = [Named(f"{index:02}", one) for index, one in enumerate(receipts)]
    options = {"model": site.model, "threads": 1}
    made = verify_receipts(named, options, (), FeatureFiles(images, embeds))
    return sorted(made, key=lambda verdict: verdict.name)


def forged(receipt: Receipt, contents: Contents) -> Receipt:
    """The receipt of a liar who has other features."""
    features = msgspec.json.encode(contents.features, order="sorted")
    digest = digest_of(bytes.fromhex(contents.salt), "features", features)
    return Receipt(msgspec.structs.replace(receipt.header, features=digest), contents)


# --- what is true ------------------------------------------------------------------------------------------------


def test_answers_are_verified_with_the_images(site: Site) -> None:
    receipts = [msgspec.json.decode(one.to_json(), type=Receipt) for one in site.receipts]
    assert receipts == site.receipts
    assert len({one.header.features for one in receipts if isinstance(one.header, Header)}) == 4
    got: list[Verdict] = verdicts(site, receipts, site.files[:2], [site.embeds])
    assert [(one.status, one.num_features) for one in got] == [("verified", n) for n in (7, 10, 17, 1)], got
    assert [one.num_tokens for one in got] == [24, 10, 10, 24]


def test_what_is_missing_is_named(site: Site) -> None:
    """No image, and one of two; what could be computed is."""
    got = verdicts(site, site.receipts, [site.files[1]])
    assert [one.status for one in got] == ["not computed", "verified", "not computed", "not computed"]
    use = contents_of(site.receipts[0]).features[0]
    last = use.position + use.num_rows - 1
    assert f"its tokens {use.position} to {last} (digest {use.digest:.16}) and 6 more are missing" in got[0].text
    assert "--image or --prompt-embeds" in got[3].text
    (verdict,) = verdicts(site, [site.receipts[1].without_contents()], [])
    assert "withheld" in verdict.text


def test_it_is_the_image_that_counts_and_not_its_file(site: Site, tmp_path: Path) -> None:
    path = str(tmp_path / "other.bmp")
    Image.fromarray(IMAGES[1]).save(path)
    assert [one.status for one in verdicts(site, [site.receipts[1]], [path])] == ["verified"]


# --- what is not -------------------------------------------------------------------------------------------------


def test_another_pixel_and_another_image_are_found(site: Site, tmp_path: Path) -> None:
    for path in (site.flipped, site.files[2]):
        (verdict,) = verdicts(site, [site.receipts[1]], [path])
        assert (verdict.status, verdict.fields) == ("differs", ["features"])
        assert f"not in it: {path}" in verdict.text
    other = str(tmp_path / "rows.npy")
    np.save(other, np.where(np.arange(WIDTH) == 7, np.nextafter(ROWS, np.float32(9)), ROWS).astype(np.float32))
    (verdict,) = verdicts(site, [site.receipts[3]], [], [other])
    assert (verdict.status, verdict.fields) == ("differs", ["features"])


def test_a_receipt_that_names_another_image_is_found_by_its_tokens(site: Site) -> None:
    """The position is that at which a generated answer with the other image first differs."""
    contents, truth = contents_of(site.receipts[1]), site.truth
    assert truth.submitted is not None
    features = [UsedFeature(use.position, use.num_rows, use.digest.hex()) for use, _ in truth.submitted.features]
    lie = forged(site.receipts[1], msgspec.structs.replace(contents, features=features))
    (verdict,) = verdicts(site, [lie], [site.flipped])
    assert found(verdict) == (0, *first_difference(contents.answers[0], truth.outputs[0].token_ids))


def test_places_that_no_prompt_has_are_found(site: Site) -> None:
    contents = contents_of(site.receipts[1])
    first, second, *rest = contents.features
    far = msgspec.structs.replace(first, position=600)
    short = msgspec.structs.replace(first, num_rows=first.num_rows - 1)
    for features, text in (
        ([second, first, *rest], "features must be in order"),
        ([far], "must be inside the prompt"),
        ([short, second, *rest], "has 16 rows but replaces 15 tokens"),
    ):
        lie = forged(site.receipts[1], msgspec.structs.replace(contents, features=features))
        (verdict,) = verdicts(site, [lie], site.files)
        assert (verdict.status, text in verdict.text) == ("differs", True), verdict
    (verdict,) = verdicts(site, [forged(site.receipts[1], msgspec.structs.replace(contents, features=[]))], [])
    assert verdict.status == "differs", "a header says that there are none by an empty text"


def test_features_that_were_not_signed_are_found(site: Site) -> None:
    contents = contents_of(site.receipts[1])
    for features in (contents.features[:-1], []):
        lie = msgspec.structs.replace(contents, features=features)
        (verdict,) = verdicts(site, [msgspec.structs.replace(site.receipts[1], contents=lie)], site.files)
        assert (verdict.status, verdict.fields[0]) == ("differs", "features")


def test_files_and_models_that_do_not_fit(site: Site, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ConfigError, match=r"--image .*text.png: .*cannot be read"):
        verdicts(site, [site.receipts[1]], [str(tmp_path / "text.png")])
    with pytest.raises(ConfigError, match=r"--prompt-embeds .*text.png: prompt_embeds is of another format"):
        verdicts(site, [site.receipts[3]], [], [str(tmp_path / "text.png")])
    options = {"model": write_model(tmp_path / "model", 1), "max_model_len": 128, "threads": 1}
    (verdict,) = verify_receipts([Named("one", site.receipts[1])], options)
    assert verdict.status == "differs"
    assert "weights" in verdict.fields


# --- HTTP, the command and captures ------------------------------------------------------------------------------


def test_chats_over_http(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[1]).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 10, "temperature": 0.9, "receipt": True}
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with serving("-m", site.model, *options) as caller:
        whole = caller.post("/v1/chat/completions", body)
        streamed = caller.post("/v1/chat/completions", {**body, "stream": True})
    (tmp_path / "whole").write_bytes(whole.body)
    (tmp_path / "streamed").write_text(json.dumps(streamed.events[-1]))
    words = ("--model", site.model, "--threads", 1)
    status, got = run(capfd, tmp_path / "whole", tmp_path / "streamed", "--image", url, *words)
    assert (status, [one["num_features"] for one in got]) == (0, [10, 10]), got
    status, got = run(capfd, tmp_path / "whole", "--image", site.flipped, *words)
    assert (status, got[0]["fields"]) == (3, ["features"])
    assert run(capfd, tmp_path / "whole", *words)[0] == 5


def test_a_capture(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    status, got = run(capfd, site.capture)
    assert (status, [one["status"] for one in got]) == (5, ["not computed"] * 5)
    words = ("--image", site.files[0], "--image", site.files[1], "--prompt-embeds", site.embeds)
    status, got = run(capfd, site.capture, *words)
    assert status == 5, "the flipped image is missing"
    verified = [one["num_features"] for one in got if one["status"] == "verified"]
    assert sorted(verified) == [1, 7, 10, 17]
    status, got = run(capfd, site.capture, *words, "--image", site.flipped)
    assert (status, {one["status"] for one in got}) == (0, {"verified"})


def test_vectors_of_images(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the same model, which pools: receipts, and a capture."""
    capture = tmp_path / "run.cap"
    with LLM(site.model, **OPTIONS, runner="pooling", capture=str(capture)) as llm:
        prompts: list[Any] = [asked(*IMAGES[:2]), "a text", asked(IMAGES[2])]
        outputs = llm.embed(prompts, use_tqdm=False)
        receipts = [llm.receipt(one) for one in outputs]
    given = ("--image", site.files[0], "--image", site.files[1])
    expected = [("verified", 17, 1), ("verified", 0, 1), ("not computed", 0, 0)]
    got: list[Verdict] = verdicts(site, receipts, site.files[:2])
    assert [(one.status, one.num_features, one.num_vectors) for one in got] == expected
    status, shown = run(capfd, capture, "--model", site.model, *given)
    assert status == 5
    counts = ("num_features", "num_vectors")
    assert sorted((one["status"], *(one.get(count, 0) for count in counts)) for one in shown) == sorted(expected)
    (whole,) = verdicts(site, receipts[2:], site.files[2:])
    assert (whole.status, whole.num_vectors) == ("verified", 1)
