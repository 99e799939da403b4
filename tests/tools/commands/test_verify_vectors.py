"""`engine-core verify` of vectors: what an engine answered is verified, and one changed bit is found."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from frontend.llm import LLM
from ipc.errors import InvalidRequestError
from ipc.keys.signing import make_signing_key
from ipc.params.pooling_params import PoolingParams
from ipc.records.receipt import Contents, Receipt, VectorHeader, digest_of, ids_bytes
from ipc.tables.arrays import Floats
from kernels.cpu.build import runnable_variants
from tests.tools.commands.test_verify import SIZES, contents_of, run, verdicts, write_model
from tools.cli import main

pytestmark = pytest.mark.timeout(120)

PROMPTS = [[number, 7, 8] * (1 + number % 4) for number in range(1, 13)]
OF_TOKENS = PoolingParams(task="token_embed")
PLAIN = PoolingParams(task="embed", use_activation=False, dimensions=5)


class Site(NamedTuple):
    """The answers of an engine that embeds, and their receipts. capture: of all that it did."""

    model: str
    key: str
    receipts: list[Receipt]
    vectors: list[Floats]
    capture: Path

    @property
    def options(self) -> dict[str, Any]:
        return {**SIZES, "model": self.model}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("vectors")
    model, key, capture = write_model(folder / "model", 1), str(folder / "key"), folder / "run.cap"
    make_signing_key(key)
    with LLM(model, **SIZES, runner="pooling", capture=str(capture)) as llm:
        outputs: list[Any] = [*llm.embed(PROMPTS, use_tqdm=False)]
        outputs += llm.encode(PROMPTS[:3], OF_TOKENS, use_tqdm=False)
        outputs += llm.encode(PROMPTS[:3], PLAIN, use_tqdm=False)
        receipts = [llm.receipt(output, key) for output in outputs]
        (cosine,) = llm.score("abc", "abd", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="follows from them"):
            llm.receipt(cosine)
    return Site(model, key, receipts, [output.vectors for output in outputs], capture)


def forged(receipt: Receipt, contents: Contents | None = None, **header: Any) -> Receipt:
    """A receipt whose digests of the prompt and the parameters are right."""
    contents = contents_of(receipt) if contents is None else contents
    salt = bytes.fromhex(contents.salt)
    digests = {
        "prompt": digest_of(salt, "prompt", ids_bytes(contents.prompt_token_ids)),
        "num_prompt_tokens": len(contents.prompt_token_ids),
        "parameters": digest_of(salt, "parameters", msgspec.json.encode(contents.parameters, order="sorted")),
    }
    return Receipt(msgspec.structs.replace(receipt.header, **{**digests, **header}), contents)


def of_vectors(receipt: Receipt, vectors: Floats) -> Receipt:
    """The receipt of a liar who has these vectors."""
    digest = digest_of(bytes.fromhex(contents_of(receipt).salt), "vectors", vectors.astype("<f4").tobytes())
    return forged(receipt, vectors=digest)


def fields_of(site: Site, lies: Sequence[Receipt]) -> list[list[str]]:
    found = verdicts(lies, site.options)
    assert {one.status for one in found} == {"differs"}, found
    return [one.fields for one in found]


# --- what is true ------------------------------------------------------------------------------------------------


def test_every_vector_is_verified(site: Site) -> None:
    """Embeddings, of each token, shortened and of their own length; signed."""
    receipts = [msgspec.json.decode(one.to_json(), type=Receipt) for one in site.receipts]
    assert receipts == site.receipts
    trusted = [site.receipts[0].public_key]
    for verdict, vectors in zip(verdicts(receipts, site.options, trusted), site.vectors, strict=True):
        assert (verdict.status, verdict.is_trusted, verdict.num_vectors) == ("verified", True, len(vectors)), verdict
    shapes = {(one.header.num_vectors, one.header.width) for one in site.receipts if of_kind(one)}
    assert {(1, 64), (1, 5), (len(PROMPTS[1]), 64)} <= shapes


def of_kind(receipt: Receipt) -> VectorHeader:
    assert isinstance(receipt.header, VectorHeader)
    return receipt.header


def test_whoever_has_the_vector_can_compare_it(site: Site) -> None:
    """By the page's formula, and by the engine's own comparison."""
    header, contents = of_kind(site.receipts[0]), contents_of(site.receipts[0])
    vectors = site.vectors[0]
    assert header.vectors == digest_of(bytes.fromhex(contents.salt), "vectors", vectors.tobytes())
    assert header.has_vectors(contents, vectors)
    assert not header.has_vectors(contents, vectors.reshape(2, -1))
    assert not header.has_vectors(contents, site.vectors[1])
    assert not contents.answers, "the vectors themselves are not in it"


def test_receipts_of_other_kernels_are_verified_by_these(site: Site) -> None:
    receipts = []
    for variant in runnable_variants():
        options = {**SIZES, "dtype": "bfloat16", "runner": "pooling"}
        with LLM(site.model, **options, cpu_kernels=variant) as llm:
            receipts.append(llm.receipt(llm.embed([[5, 6, 7]], use_tqdm=False)[0]))
    assert len({one.header.fingerprint for one in receipts}) == len(receipts)
    found = verdicts([*receipts, site.receipts[0]], {"model": site.model, "threads": 1})
    assert {one.status for one in found} == {"verified"}


# --- what is not -------------------------------------------------------------------------------------------------


def test_one_flipped_bit_of_any_vector_is_found(site: Site) -> None:
    rng, lies = np.random.default_rng(3), []
    for _ in range(50):
        index = int(rng.integers(len(site.receipts)))
        bits = site.vectors[index].astype("<f4").view("<u4").copy()
        bits.flat[rng.integers(bits.size)] ^= np.uint32(1 << rng.integers(32))
        lies.append(of_vectors(site.receipts[index], bits.view("<f4")))
    assert fields_of(site, lies) == [["vectors"]] * 50


def test_other_prompts_parameters_and_shapes_are_found(site: Site) -> None:
    receipt, of_tokens = site.receipts[0], site.receipts[len(PROMPTS)]
    contents = contents_of(receipt)
    changes: list[dict[str, Any]] = [
        {"prompt_token_ids": [*contents.prompt_token_ids[:-1], 9]},
        {"parameters": {"task": "embed", "use_activation": False}},
        {"parameters": {"task": "embed", "dimensions": 3}},
        {"parameters": {"task": "token_embed"}},
    ]
    lies = [forged(receipt, msgspec.structs.replace(contents, **changed)) for changed in changes]
    lies.append(forged(of_tokens, num_vectors=1))
    assert fields_of(site, lies) == [["vectors"]] * 5


def test_contents_that_were_not_signed_are_found(site: Site) -> None:
    contents = contents_of(site.receipts[0])
    for changed, fields in (
        ({"prompt_token_ids": [*contents.prompt_token_ids[:-1], 9]}, ["prompt", "vectors"]),
        ({"parameters": {"task": "embed", "dimensions": 3}}, ["parameters", "vectors"]),
        ({"salt": "00" * 32}, ["prompt", "parameters", "vectors"]),
    ):
        lie = msgspec.structs.replace(contents, **changed)
        assert fields_of(site, [msgspec.structs.replace(site.receipts[0], contents=lie)]) == [fields]


def test_parameters_that_no_engine_takes_are_found(site: Site) -> None:
    """Two when they are read, the others by the engine; the good one among them is verified."""
    contents = contents_of(site.receipts[0])
    wrong: list[dict[str, Any]] = [
        {"task": "generate"},
        {"task": "embed", "second_from": "x"},
        {"task": "embed", "truncate_prompt_tokens": 3},
        {"task": "classify"},
        {"task": "embed", "dimensions": 1000},
        {"task": "embed", "second_from": 1000},
    ]
    lies = [forged(site.receipts[0], msgspec.structs.replace(contents, parameters=one)) for one in wrong]
    *found, last = verdicts([*lies, site.receipts[1]], site.options)
    assert [one.fields for one in found] == [["parameters"]] * 3 + [[]] * 3
    assert [one.status for one in found] == ["differs"] * 6
    assert [bool(one.text) for one in found] == [True] * 6
    assert last.status == "verified"


def test_another_model_and_a_model_that_generates(site: Site, tmp_path: Path) -> None:
    options = {**site.options, "model": write_model(tmp_path / "other", 2)}
    (verdict,) = verdicts([site.receipts[0]], options)
    assert (verdict.status, verdict.fields) == ("differs", ["weights"])
    (verdict,) = verdicts([site.receipts[0]], {**site.options, "runner": "generate"})
    assert (verdict.status, verdict.fields) == ("differs", ["profile"])
    (verdict,) = verdicts([site.receipts[0].without_contents()], site.options)
    assert (verdict.status, "withheld" in verdict.text) == ("not computed", True)


# --- scores ------------------------------------------------------------------------------------------------------


def test_scores(site: Site) -> None:
    """Of a classifier with one label. A cosine is of two answers, each of which has its receipt."""
    own = {"classifier_from_token": "no,yes"}
    with LLM(site.model, **SIZES, **own) as llm:
        (score,) = llm.score("abc", "abd", use_tqdm=False, template="{query} {document}")
        (classes,) = llm.classify(["abc"], use_tqdm=False)
        receipts = [llm.receipt(score), llm.receipt(classes)]
    assert {one.status for one in verdicts(receipts, {**site.options, **own})} == {"verified"}
    assert fields_of(site, receipts) == [["profile"]] * 2, "the option is the verifier's, as the model is"


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--model", site.model, "--threads", "1")
    answer = tmp_path / "answer"
    answer.write_text(json.dumps({"data": [], "receipts": [json.loads(one.to_json()) for one in site.receipts[:2]]}))
    status, got = run(capfd, answer, "--key", f"{site.key}.pub", *words)
    assert (status, [(one["status"], one["num_vectors"]) for one in got]) == (0, [("verified", 1)] * 2)
    assert main(["verify", str(answer), *words]) == 0
    assert "verified: 1 vector, signed by" in capfd.readouterr().out
    answer.write_bytes(of_vectors(site.receipts[0], site.vectors[1]).to_json())
    assert main(["verify", str(answer), *words]) == 3
    assert "differs: fields: vectors" in capfd.readouterr().out


def test_batch_lines(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = (
        ("/v1/embeddings", {"input": ["abc", [5, 6]], "receipt": True}),
        ("/v1/rerank", {"query": "abc", "documents": ["abd", "c"], "receipt": True}),
    )
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(bodies)
    ]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    key = ("--receipt-key", site.key)
    done = main(["batch", str(given), "-o", str(out), "-m", site.model, "--runner", "pooling", *options, *key])
    assert done == 0, capfd.readouterr().err
    status, got = run(capfd, out, "--key", f"{site.key}.pub", "--model", site.model, "--threads", 1)
    assert (status, {one["status"] for one in got}, len(got)) == (0, {"verified"}, 5)


def test_a_capture(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, got = run(capfd, site.capture)
    assert (status, {one["status"] for one in got}) == (0, {"verified"})
    assert sum(one["num_vectors"] for one in got) >= sum(map(len, site.vectors))
    status, (verdict,) = run(capfd, site.capture, "--model", write_model(tmp_path / "other", 2))
    assert (status, verdict["fields"]) == (3, ["weights"])
