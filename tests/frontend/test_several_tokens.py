"""Several tokens of a request in one message, through the border, the journal and the caller's outputs."""

from core.executors.fake import choice_seed
from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.frontend.conftest import VOCAB_SIZE

NUM_TOKENS = 200


def test_outputs_are_those_of_one_token_a_step() -> None:
    with LLM(
        executor="fake", executor_options=fake_options(vocab_size=VOCAB_SIZE, tokens_per_step=7), max_model_len=400
    ) as llm:
        prompts = [[number, 5, 6] for number in range(12)]
        params = [
            SamplingParams(
                max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=number, n=1 + number % 3, logprobs=1
            )
            for number in range(12)
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
        num_steps = llm.statistics().num_steps
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert len(result.outputs) == one.n
        for choice, output in enumerate(result.outputs):
            expected = fake_tokens(prompt, NUM_TOKENS, VOCAB_SIZE, choice_seed(one.seed or 0, choice))
            assert list(output.token_ids) == expected
            assert output.logprobs is not None
            assert [next(iter(entry)) for entry in output.logprobs] == expected
    assert num_steps < NUM_TOKENS
