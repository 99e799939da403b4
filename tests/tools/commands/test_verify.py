"""`engine-core verify`: what an engine answered is verified, and whatever else is found at the right position."""

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from core.capture.file import CaptureFile
from frontend.llm import LLM
from frontend.lora import LoRARequest
from frontend.results.outputs import CompletionOutput, RequestOutput
from ipc.errors import InvalidRequestError
from ipc.keys.signing import make_signing_key
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.records.receipt import AnswerDigest, Contents, Receipt, digest_of, ids_bytes
from kernels.cpu.build import runnable_variants
from tests.core.adapters.peft_files import random_matrices, write_peft
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, schema, structured, tokenizer_files
from tools.cli import main
from tools.commands.verify.__main__ import Verdict, verify_receipts
from tools.commands.verify.local_engine import Difference, Outcome
from tools.commands.verify.sources import Named, claim_of
from tools.commands.verify.verifier import Answer, Claim, Verifier

pytestmark = pytest.mark.timeout(120)

MODEL = {**LLAMA, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "num_hidden_layers": 2}
LENGTH = 24
MAX_ROWS = 16
SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 128, "block_size": 4}
NAMES = schema(name={"type": "string", "maxLength": 6}, age={"type": "integer", "minimum": 0, "maximum": 99})
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "ignore_eos": False},
    {"temperature": 0.8, "seed": 11, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"n": 3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "logprobs": 2},
    {"bad_words_token_ids": [[4], [7, 8]], "logit_bias": {9: 3.0, 12: -100.0}},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(0, VOCAB_SIZE, 5))},
    {"allowed_token_ids": list(range(40, 200)), "xtc_probability": 0.5, "xtc_threshold": 0.02, "top_n_sigma": 2.0},
    {"structured_outputs": structured(json=NAMES), "ignore_eos": False},
    {"structured_outputs": structured(regex="[a-e]{3,9}(00)?"), "ignore_eos": False, "n": 2},
    {"stop": ["é", "a", "b", "c"], "ignore_eos": False, "n": 2},
]
#: Beam searches: early ends, fewer answers than beams, longer and shorter ones preferred.
SEARCHES: list[dict[str, Any]] = [
    {"n": 2, "stop_token_ids": list(range(0, VOCAB_SIZE, 9)), "ignore_eos": False},
    {"n": 2, "best_of": 4, "early_stopping": True, "length_penalty": 2.0, "stop_token_ids": [4, 9, 14]},
    {
        "n": 3,
        "temperature": 0.7,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "structured_outputs": structured(regex="[a-e]{3,9}(00)?"),
        "ignore_eos": False,
    },
]
#: One token again and again: every draft for it is right, whatever runs beside it.
FORCED: dict[str, Any] = {"temperature": 0.0, "allowed_token_ids": [9]}


class Site(NamedTuple):
    """An engine with receipts of its answers. adapters: paths by name."""

    model: str
    llm: LLM
    key: str
    adapters: dict[str, str]
    receipts: list[Receipt]

    @property
    def options(self) -> dict[str, Any]:
        return {**SIZES, "model": self.model, "enable_lora": True, "lora_modules": self.adapters}


def params(options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **options})


def answered(
    llm: LLM, prompts: Sequence[Any], given: Sequence[SamplingParams], lora: Any = None
) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": one} for one in prompts], given, use_tqdm=False, lora_request=lora)


def answered_together(llm: LLM, prompts: Sequence[Any], given: Sequence[SamplingParams]) -> list[RequestOutput]:
    """As answered(), but the engine has all rows' requests before its first step, however late they arrive."""
    llm.client.pause()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answered, llm, prompts, given)
        while llm.statistics().num_waiting < MAX_ROWS and not asked.done():
            time.sleep(0.01)
        llm.client.resume()
        return asked.result()


def write_model(folder: Path, seed: int) -> str:
    path = write(folder, MODEL, random_weights(model_shapes(MODEL), seed))
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Few blocks, so that requests are preempted; drafts; two adapters."""
    folder = tmp_path_factory.mktemp("site")
    model = write_model(folder / "model", 1)
    heads, hidden, inner = MODEL["num_attention_heads"] * MODEL["head_dim"], MODEL["hidden_size"], 96
    shapes = {"model.layers.0.self_attn.q_proj": (heads, hidden), "model.layers.1.mlp.up_proj": (inner, hidden)}
    adapters = {}
    for seed, name in enumerate(("one", "two")):
        matrices = random_matrices(shapes, 4, seed, size=2.0)
        adapters[name] = str(write_peft(folder / name, matrices, rank=4, alpha=8.0))
    key = str(folder / "key")
    make_signing_key(key)
    own = {"enable_lora": True, "lora_modules": adapters, "num_blocks_override": 60, "max_num_seqs": MAX_ROWS}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "step_ns": [10**6] * 8}
    with LLM(model, **SIZES, **own, seed=5, speculative_config=drafts, restart_engine=False) as llm:
        rng = random.Random(5)
        prompts = [[rng.randrange(250) for _ in range(rng.randrange(3, 30))] for _ in range(3 * len(OPTIONS) + 1)]
        outputs = answered_together(llm, prompts, [params(one) for one in [*OPTIONS * 3, FORCED]])
        loras = [LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters.items(), 1)]
        for lora in loras:
            outputs += answered(llm, prompts[:2], [params({"seed": 3})] * 2, lora)
        statistics = llm.statistics()
        assert statistics.num_preemptions > 0
        assert statistics.num_accepted_tokens > 0
        yield Site(model, llm, key, adapters, [llm.receipt(output, key) for output in outputs])


def verdicts(receipts: Sequence[Receipt], options: dict[str, Any], trusted: Sequence[str] = ()) -> list[Verdict]:
    named = [Named(f"{index:04}", one) for index, one in enumerate(receipts)]
    return sorted(verify_receipts(named, options, trusted), key=lambda verdict: verdict.name)


def forged(receipt: Receipt, contents: Contents, **header: Any) -> Receipt:
    """A receipt whose digests are right, as somebody would make it who lies."""
    salt = bytes.fromhex(contents.salt)
    digests = {
        "prompt": digest_of(salt, "prompt", ids_bytes(contents.prompt_token_ids)),
        "parameters": digest_of(salt, "parameters", msgspec.json.encode(contents.parameters, order="sorted")),
        "answers": [
            AnswerDigest(digest_of(salt, f"answer {index}", ids_bytes(ids)), len(ids), one.finish_reason)
            for index, (ids, one) in enumerate(zip(contents.answers, receipt.header.answers, strict=True))
        ],
    }
    return Receipt(msgspec.structs.replace(receipt.header, **{**digests, **header}), contents)


def found(verdict: Verdict) -> Difference:
    assert verdict.status == "differs", verdict
    assert verdict.answer is not None, verdict
    assert verdict.position is not None, verdict
    return Difference(verdict.answer, verdict.position, verdict.expected, verdict.got)


def contents_of(receipt: Receipt) -> Contents:
    assert receipt.contents is not None
    return receipt.contents


def first_difference(claimed: Sequence[int], computed: Sequence[int]) -> tuple[int, int | None, int | None]:
    """Position, computed and claimed token."""
    pairs = enumerate(zip([*computed, None], [*claimed, None], strict=False))
    return next((index, ours, theirs) for index, (ours, theirs) in pairs if ours != theirs)


def sampled(site: Site, count: int) -> list[Receipt]:
    """Receipts of plainly sampled answers, one each, with many likely tokens."""
    rng = random.Random(9)
    prompts = [[rng.randrange(250) for _ in range(5)] for _ in range(count)]
    outputs = answered(site.llm, prompts, [params({"seed": seed, "temperature": 1.5}) for seed in range(count)])
    return [site.llm.receipt(output) for output in outputs]


# --- what is true ------------------------------------------------------------------------------------------------


def test_every_answer_is_verified(site: Site) -> None:
    """Preempted, speculated, penalised, constrained, of several choices, of adapters."""
    receipts = [msgspec.json.decode(one.to_json(), type=Receipt) for one in site.receipts]
    assert receipts == site.receipts
    trusted = [site.receipts[0].public_key]
    for verdict, receipt in zip(verdicts(receipts, site.options, trusted), receipts, strict=True):
        assert (verdict.status, verdict.is_trusted) == ("verified", True), (verdict, receipt.contents)
        assert verdict.num_tokens == sum(map(len, contents_of(receipt).answers)) > 0
    finishes = {one.finish_reason for receipt in receipts for one in receipt.header.answers}
    assert finishes == {"stop", "length"}


def test_an_answer_takes_few_steps(site: Site) -> None:
    """One for prompt and answer, one that takes the abort in."""
    (receipt,) = sampled(site, 1)
    verifier = Verifier(config_from_options(**site.options))
    try:
        assert verifier.verify([claim_of(receipt)]) == [Outcome()]
        assert verifier.num_steps == 2
        assert verifier.verify([claim_of(one) for one in site.receipts]) == [Outcome()] * len(site.receipts)
        assert verifier.num_steps < 40, "and many take hardly more together"
    finally:
        verifier.close()


def test_a_step_has_a_whole_answer_unless_the_caller_chose_another_budget(site: Site) -> None:
    claims = [claim_of(one) for one in site.receipts]
    own = {name: value for name, value in site.options.items() if name != "max_num_batched_tokens"}
    steps = []
    for chosen, expected in (({}, 1024), ({"max_num_batched_tokens": 64}, 64)):
        verifier = Verifier(config_from_options(**{**own, **chosen}))
        try:
            assert verifier.config.max_num_batched_tokens == expected
            assert verifier.verify(claims) == [Outcome()] * len(claims)
            steps.append(verifier.num_steps)
        finally:
            verifier.close()
    assert steps[0] < steps[1]


def test_choices_share_the_step_of_their_prompt(site: Site) -> None:
    """The first one's answer could be verified in that step, and the others' prompt would be computed again."""
    prompt = {"prompt_token_ids": [7, 30, 9] * 10}
    (output,) = site.llm.generate(prompt, params({"n": 4, "seed": 3, "temperature": 1.5}), use_tqdm=False)
    claim = claim_of(site.llm.receipt(output))
    short = claim._replace(answers=[Answer(one.token_ids[: 3 + 2 * at]) for at, one in enumerate(claim.answers)])
    verifier = Verifier(config_from_options(**{**site.options, "block_size": 64}))
    try:
        assert verifier.verify([short]) == [Outcome()]
        assert verifier.num_steps <= 4
    finally:
        verifier.close()


def test_beam_searches_are_run_again(site: Site) -> None:
    given = [params({"temperature": 0.0, **one, "use_beam_search": True}) for one in SEARCHES]
    made = [site.llm.receipt(output) for output in answered(site.llm, [[5, 6, 7], [8] * 9, [200, 3]], given)]
    assert {one.finish_reason for receipt in made for one in receipt.header.answers} == {"stop", "length"}
    assert [verdict.status for verdict in verdicts(made, site.options)] == ["verified"] * len(made)
    for receipt in made:
        contents = contents_of(receipt)
        best, *_, last = contents.answers
        swapped = msgspec.structs.replace(contents, answers=[last, *contents.answers[1:-1], best])
        flipped = msgspec.structs.replace(contents, answers=[*contents.answers[:-1], [*last[:-1], 1]])
        of_swapped, of_flipped = verdicts([forged(receipt, swapped), forged(receipt, flipped)], site.options)
        pairs = enumerate(itertools.zip_longest(best, last))
        assert found(of_swapped)[:2] == (0, next(at for at, (a, b) in pairs if a != b))
        assert found(of_flipped)[:2] == (len(contents.answers) - 1, len(last) - 1)
        longer = {**contents.parameters, "length_penalty": 8.0, "max_tokens": 3}
        (other,) = verdicts([forged(receipt, msgspec.structs.replace(contents, parameters=longer))], site.options)
        assert other.status == "differs"


def test_receipts_of_other_kernels_are_verified_by_these(site: Site) -> None:
    """In bfloat16, in which each variant has arithmetic of its own, and all of them at once."""
    receipts, (own,) = list[Receipt](), sampled(site, 1)
    for variant in runnable_variants():
        with LLM(site.model, **{**SIZES, "dtype": "bfloat16"}, cpu_kernels=variant) as llm:
            outputs = answered(llm, [[5, 6, 7]] * 2, [params({"seed": 4}), params({"n": 2})])
            receipts += [llm.receipt(output) for output in outputs]
    assert {one.header.cpu_kernels for one in receipts} == set(runnable_variants()) >= {"portable"}
    assert len({one.header.fingerprint for one in receipts}) == len(runnable_variants())
    options = {"model": site.model, "threads": 1}
    assert {one.status for one in verdicts([*receipts, own], options)} == {"verified"}
    last = receipts[-1]
    (verdict,) = verdicts([forged(last, contents_of(last), cpu_kernels="portable")], options)
    assert ("profile" in verdict.fields) == (last.header.cpu_kernels != "portable"), verdict


# --- what is not -------------------------------------------------------------------------------------------------


def test_flipped_tokens_are_found(site: Site) -> None:
    rng, lies, expected = random.Random(1), [], []
    for _ in range(100):
        receipt = rng.choice(site.receipts)
        contents = contents_of(receipt)
        answers = [list(ids) for ids in contents.answers]
        answer = rng.randrange(len(answers))
        position = rng.randrange(len(answers[answer]))
        token = answers[answer][position]
        lie = (token + rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
        answers[answer][position] = lie
        lies.append(forged(receipt, msgspec.structs.replace(contents, answers=answers)))
        expected.append(Difference(answer, position, token, lie))
    assert [found(one) for one in verdicts(lies, site.options)] == expected


def test_tokens_that_the_model_does_not_have_are_found(site: Site) -> None:
    """They never reach the model, which would look up a row beyond its embedding."""
    receipt = site.receipts[0]
    assert receipt.contents is not None
    ids = receipt.contents.answers[0]
    wrong = []
    for at, token in ((0, VOCAB_SIZE), (3, 2**31 - 1), (len(ids) - 1, VOCAB_SIZE)):
        answers = [[*ids[:at], token, *ids[at + 1 :]], *receipt.contents.answers[1:]]
        wrong.append((forged(receipt, msgspec.structs.replace(receipt.contents, answers=answers)), at, token))
    for verdict, (_, at, token) in zip(verdicts([one for one, _, _ in wrong], site.options), wrong, strict=True):
        assert found(verdict) == Difference(0, at, ids[at], token)


def test_cut_and_continued_answers_are_found(site: Site) -> None:
    """An answer that ends too early goes on here, and one that goes on after its end has ended here."""
    receipt = next(one for one in site.receipts if one.header.answers[0].finish_reason == "stop")
    contents = contents_of(receipt)
    first, *others = contents.answers
    cut = msgspec.structs.replace(contents, answers=[first[:-1], *others])
    longer = msgspec.structs.replace(contents, answers=[[*first, 7], *others])
    got = [found(one) for one in verdicts([forged(receipt, cut), forged(receipt, longer)], site.options)]
    assert got == [Difference(0, len(first) - 1, first[-1], None), Difference(0, len(first), None, 7)]
    (whole,) = sampled(site, 1)
    short = msgspec.structs.replace(contents_of(whole), answers=[contents_of(whole).answers[0][:-3]])
    (verdict,) = verdicts([forged(whole, short)], site.options)
    assert (verdict.status, verdict.fields) == ("differs", ["finish_reason"])


def test_ends_by_stop_strings_are_compared(site: Site) -> None:
    """An answer that ends before its stop string is found, and one that goes on after it with the right tokens."""
    given = [params({"stop": ["a", "b", "ce"], "seed": seed, "ignore_eos": False}) for seed in range(12)]
    outputs = answered(site.llm, [[5, 6]] * len(given), given)
    texts = [index for index, output in enumerate(outputs) if output.outputs[0].stop_reason in ("a", "b", "ce")]
    texts = [index for index in texts if 1 < len(outputs[index].outputs[0].token_ids) < LENGTH]
    assert len(texts) > 3
    unstopped = answered(site.llm, [[5, 6]] * len(given), [one.changed(stop=None, ignore_eos=True) for one in given])
    honest, lies, expected = [], list[Receipt](), []
    for index in texts:
        ids = outputs[index].outputs[0].token_ids
        honest.append(site.llm.receipt(outputs[index]))
        contents = contents_of(honest[-1])
        further = list(unstopped[index].outputs[0].token_ids[: len(ids) + 2])
        assert further[: len(ids)] == ids
        if not {EOS, *ids} & set(further[len(ids) :]):
            lies.append(forged(honest[-1], msgspec.structs.replace(contents, answers=[further])))
            expected.append(Difference(0, len(ids), None, further[len(ids)]))
        lies.append(forged(honest[-1], msgspec.structs.replace(contents, answers=[list(ids[:-1])])))
        expected.append(Difference(0, len(ids) - 1, ids[-1], None))
    assert {one.status for one in verdicts(honest, site.options)} == {"verified"}
    assert len({one.got is None for one in expected}) == 2
    assert [found(one) for one in verdicts(lies, site.options)] == expected


def test_what_decides_where_a_stop_string_is(site: Site) -> None:
    """Special tokens that are shown may complete one; without stop strings they decide nothing."""
    given = [params({"skip_special_tokens": False, **more}) for more in ({"stop": ["<"]}, {})]
    receipts = [site.llm.receipt(output) for output in answered(site.llm, [[5]] * 2, given)]
    assert [contents_of(one).parameters.get("skip_special_tokens") for one in receipts] == [False, None]
    assert {one.status for one in verdicts(receipts, site.options)} == {"verified"}


@pytest.mark.parametrize("what", ["seed", "parameters", "prompt"])
def test_other_seeds_parameters_and_prompts_are_found(site: Site, what: str) -> None:
    """The position is that at which a generated answer with them first differs."""
    receipts, lies, prompts, given = sampled(site, 100), [], [], []
    for index, receipt in enumerate(receipts):
        contents, header = contents_of(receipt), dict[str, Any]()
        changed, prompt, seed = dict(contents.parameters), list(contents.prompt_token_ids), index
        if what == "seed":
            seed = index + 1000
            header["seed"] = f"{seed:016x}"
        elif what == "prompt":
            prompt[index % 5] = (prompt[index % 5] + 1) % 250
        else:
            changed |= ({"top_k": 3}, {"temperature": 0.5}, {"logit_bias": {"9": 9.0}}, {"min_p": 0.5})[index % 4]
        lie = msgspec.structs.replace(contents, parameters=changed, prompt_token_ids=prompt)
        lies.append(forged(receipt, lie, **header))
        prompts.append(prompt)
        given.append(lies[-1].request().params.changed(seed=seed))
    truth = [output.outputs[0].token_ids for output in answered(site.llm, prompts, given)]
    for verdict, lie, tokens in zip(verdicts(lies, site.options), lies, truth, strict=True):
        assert found(verdict) == (0, *first_difference(contents_of(lie).answers[0], tokens))


def test_another_adapter_is_found(site: Site) -> None:
    one, two = ([each for each in site.receipts if each.header.adapter == digest] for digest in adapter_digests(site))
    assert len(one) == len(two) == 2
    lies = [forged(mine, contents_of(mine), adapter=other.header.adapter) for mine, other in zip(one, two, strict=True)]
    pairs = zip(verdicts(lies, site.options), one, two, strict=True)
    for verdict, mine, other in pairs:
        (claimed,), (computed,) = contents_of(mine).answers, contents_of(other).answers
        assert found(verdict) == (0, *first_difference(claimed, computed))
    unknown = [forged(one[0], contents_of(one[0]), adapter="00" * 16)]
    (verdict,) = verdicts(unknown, site.options)
    assert (verdict.status, verdict.fields) == ("differs", ["adapter"])
    (verdict,) = verdicts(unknown, {**SIZES, "model": site.model})
    assert (verdict.status, verdict.fields) == ("differs", ["adapter"])


def adapter_digests(site: Site) -> list[str]:
    return list(dict.fromkeys(one.header.adapter for one in site.receipts if one.header.adapter))


def test_other_weights_are_found(site: Site, tmp_path: Path) -> None:
    """By the header; and by the tokens, if the header lies."""
    model = write_model(tmp_path / "other", 2)
    options = {**SIZES, "model": model}
    receipts = sampled(site, 100)
    assert [one.fields for one in verdicts(receipts, options)] == [["weights"]] * 100
    with LLM(model, **SIZES) as llm:
        (output,) = answered(llm, [[5]], [params({})])
        own = llm.receipt(output).header
        prompts = [contents_of(one).prompt_token_ids for one in receipts]
        given = [one.request().params.changed(seed=seed) for seed, one in enumerate(receipts)]
        truth = [output.outputs[0].token_ids for output in answered(llm, prompts, given)]
    same = {"weights": own.weights, "fingerprint": own.fingerprint}
    lies = [forged(one, contents_of(one), **same) for one in receipts]
    for verdict, lie, tokens in zip(verdicts(lies, options), lies, truth, strict=True):
        assert found(verdict) == (0, *first_difference(contents_of(lie).answers[0], tokens))


def test_other_headers_are_found(site: Site) -> None:
    (receipt,) = sampled(site, 1)
    contents = contents_of(receipt)
    for field, header in {
        "profile": {"variant": "another"},
        "fingerprint": {"fingerprint": "another"},
        "tokenizer": {"tokenizer": "00"},
    }.items():
        (verdict,) = verdicts([forged(receipt, contents, **header)], site.options)
        assert (verdict.status, verdict.fields) == ("differs", [field])
    (verdict,) = verdicts([receipt], {**site.options, "max_model_len": 64})
    assert (verdict.status, verdict.fields) == ("differs", ["max_model_len"])
    for header in ({"max_model_len": 2**30}, {"dtype": "none"}, {"cpu_kernels": "none"}):
        unlike = {name: value for name, value in site.options.items() if name not in header}
        (verdict,) = verdicts([forged(receipt, contents, **header)], unlike)
        assert verdict.status == "not computed", verdict


def test_contents_that_were_not_signed_are_found(site: Site) -> None:
    """The signature stays good, as it covers the digests."""
    receipt = site.receipts[0]
    contents = contents_of(receipt)
    for field, changed in {
        "prompt": {"prompt_token_ids": [*contents.prompt_token_ids[:-1], 3]},
        "parameters": {"parameters": {**contents.parameters, "top_k": 5}},
        "answers": {"answers": [[*contents.answers[0][:-1], 3]]},
    }.items():
        lie = msgspec.structs.replace(receipt, contents=msgspec.structs.replace(contents, **changed))
        (verdict,) = verdicts([lie], site.options)
        assert (verdict.status, verdict.fields) == ("differs", [field])


@pytest.mark.parametrize(
    "parameters", [{"n": 2}, {"temperature": -1.0}, {"seed": 1}, {"use_beam_search": True, "n": 7}]
)
def test_parameters_that_no_engine_takes_are_found(site: Site, parameters: dict[str, Any]) -> None:
    receipt = site.receipts[0]
    lie = msgspec.structs.replace(contents_of(receipt), parameters=parameters)
    (verdict,) = verdicts([forged(receipt, lie)], site.options)
    assert (verdict.status, verdict.fields) == ("differs", ["parameters"])


def test_a_claim_that_the_engine_refuses_fails_alone(site: Site) -> None:
    (receipt,) = sampled(site, 1)
    good = claim_of(receipt)
    too_long = Claim(msgspec.structs.replace(good.message, prompt_token_ids=bytes(4 * 200)), [Answer([1])])
    verifier = Verifier(config_from_options(**site.options))
    try:
        first, second = verifier.verify([too_long, good])
    finally:
        verifier.close()
    assert "max_model_len is 128" in first.failure
    assert second == Outcome()


# --- the command -------------------------------------------------------------------------------------------------


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict[str, Any]]]:
    capfd.readouterr()
    status = main(["verify", "--json", *map(str, words)])
    return status, [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_the_command(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--model", site.model, "--threads", "1")
    alone, lines, batch = tmp_path / "alone.json", tmp_path / "lines", tmp_path / "batch"
    first, second = site.receipts[:2]
    alone.write_bytes(msgspec.json.format(first.to_json()))
    lines.write_bytes(b"\n".join(one.to_json() for one in (first, second)) + b"\n")
    batch.write_text(json.dumps({"response": {"body": {"receipts": [json.loads(second.to_json())]}}}) + "\n")
    status, got = run(capfd, alone, lines, batch, "--key", f"{site.key}.pub", *words)
    assert (status, [one["status"] for one in got]) == (0, ["verified"] * 4)
    assert {one["name"] for one in got} == {str(alone), f"{lines}:1", f"{lines}:2", str(batch)}
    assert main(["verify", str(alone), *words]) == 0
    assert "(not compared with --key)" in capfd.readouterr().out

    make_signing_key(str(tmp_path / "other"))
    status, got = run(capfd, alone, "--key", tmp_path / "other.pub", *words)
    assert (status, got[0]["status"]) == (4, "refused")
    assert "not among the trusted" in got[0]["text"]

    alone.write_bytes(first.without_contents().to_json())
    status, got = run(capfd, alone, *words)
    assert (status, got[0]["status"], got[0]["key"]) == (5, "not computed", first.public_key)

    contents = contents_of(second)
    answers = [[contents.answers[0][0] + 1, *contents.answers[0][1:]]]
    lines.write_bytes(forged(second, msgspec.structs.replace(contents, answers=answers)).to_json() + b'\n{"a": 1}\n')
    status, got = run(capfd, lines, tmp_path / "none", *words)
    assert (status, sorted(one["status"] for one in got)) == (4, ["differs", "refused", "refused"])
    assert main(["verify", str(lines), *words]) == 4
    token = contents.answers[0][0]
    assert f"answer 0, position 0: expected token {token}, got token {token + 1}" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["real", "real-drafts"])
def test_captures(captures: dict[str, Path], name: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, got = run(capfd, captures[name])
    assert (status, {one["status"] for one in got}) == (0, {"verified"})
    assert len(got) >= 20


def test_a_capture_of_other_weights(captures: dict[str, Path], site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    status, (verdict,) = run(capfd, captures["real"], "--model", site.model)
    assert (status, verdict["fields"]) == (3, ["weights"])
    assert CaptureFile(captures["real"]).header.model.weights


def test_a_redacted_capture_is_refused(
    captures: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "redact", str(captures["fake"]), str(tmp_path / "redacted")]) == 0
    status, (verdict,) = run(capfd, tmp_path / "redacted")
    assert (status, verdict["status"]) == (4, "refused")
    assert "redacted" in verdict["text"]


# --- receipts that there are not -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"output_kind": RequestOutputKind.DELTA}, "the parts of an answer"),
    ],
)
def test_an_answer_without_a_receipt(site: Site, given: dict[str, Any], why: str) -> None:
    (output,) = answered(site.llm, [[3, 4]], [params({})])
    assert output.submitted is not None
    output.submitted = output.submitted._replace(params=params(given))
    with pytest.raises(InvalidRequestError, match=why):
        site.llm.receipt(output)
    output.submitted = None
    with pytest.raises(InvalidRequestError, match="finished request"):
        site.llm.receipt(output)
    other: Any = CompletionOutput(0, "", [3, 4])
    with pytest.raises(InvalidRequestError, match="of a CompletionOutput: receipts are of outputs"):
        site.llm.receipt(other)
