"""Seeds of requests without one of their own, of clients that connect to one engine."""

from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options

PARAMS = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, detokenize=False)


def drawn(address: str, seed: int | None) -> list[list[int]]:
    with LLM(connect=address, seed=seed) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate([[5], [5]], PARAMS, use_tqdm=False)]


def test_a_program_with_a_seed_draws_the_same_again_and_others_do_not() -> None:
    with EngineProcess(EngineConfig(executor="fake", executor_options=fake_options(vocab_size=1000))) as engine:
        address = engine.address
        first, second = drawn(address, 1), drawn(address, 1)
        assert first == second
        assert first[0] != first[1]
        assert drawn(address, 2) != first
        assert drawn(address, None) != drawn(address, None)
