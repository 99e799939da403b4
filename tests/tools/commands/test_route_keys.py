"""CURVE on both sides of a router, and in a program that routes by itself: who has no key is not let in."""

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core import LLM, AsyncLLM, SamplingParams
from ipc.errors import AddressError, EngineDeadError, InvalidRequestError
from ipc.keys.curve import add_client, limit_client, make_engine_keys
from ipc.keys.quota import Quota
from tests.fake_tokens import fake_tokens
from tests.tools.test_cli import command, environment, serving
from tools.commands.route.__main__ import main

pytestmark = pytest.mark.timeout(120)
VOCAB, PROMPT = 1000, [5, 6, 7]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Keys:
    """The keys of one listener, and those of one client at it."""

    def __init__(self, folder: Path, name: str, client: str) -> None:
        self.client = client
        self.folder, self._file = str(folder / name), str(folder / f"{client}-at-{name}.json")
        make_engine_keys(self.folder)
        add_client(self.folder, client, self._file)

    def listen(self) -> str:
        return f"tcp://127.0.0.1:0?keys={self.folder}"

    def connect(self, address: str) -> str:
        return f"{address.partition('?')[0]}?keys={self._file}"


@contextlib.contextmanager
def routing(listen: str, replica: str) -> Iterator[str]:
    """A router that is ready; its address."""
    router = subprocess.Popen(
        command("route", "--listen", listen, "--replica", replica),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert router.stdout is not None
    assert router.stderr is not None
    try:
        line = router.stdout.readline()
        assert line.startswith("engine-core: ready at "), line + router.stderr.read()
        yield line.split()[3]
    finally:
        router.kill()
        router.wait()
        router.stdout.close()
        router.stderr.close()


def tokens_at(address: str, prompt: list[int]) -> list[int]:
    with LLM(connect=address, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


async def tokens_by_own_routing(addresses: list[str]) -> list[int]:
    async with await AsyncLLM.create(connect=addresses, route="prefix", skip_tokenizer_init=True) as llm:
        tokens: list[int] = []
        async for output in llm.generate({"prompt_token_ids": PROMPT}, PARAMS):
            tokens = list(output.outputs[0].token_ids)
        return tokens


def test_keys_on_both_sides_of_a_router_and_in_a_program(tmp_path: Path) -> None:
    at_replica, at_router = Keys(tmp_path, "replica", "router"), Keys(tmp_path, "router", "alice")
    limit_client(at_router.folder, "alice", Quota(tpm=40))
    expected = fake_tokens(PROMPT, 4, VOCAB)
    with serving(at_replica.listen(), "--executor-option", f"vocab_size={VOCAB}") as (_, replica):
        assert asyncio.run(tokens_by_own_routing([at_replica.connect(replica)])) == expected
        with routing(at_router.listen(), at_replica.connect(replica)) as router:
            assert tokens_at(at_router.connect(router), PROMPT) == expected
            with pytest.raises(InvalidRequestError, match="the key alice is limited to 40"):
                tokens_at(at_router.connect(router), list(range(3, 53)))
            with pytest.raises(EngineDeadError, match="refused the connection"):
                tokens_at(at_replica.connect(router), PROMPT)


def test_a_replica_beyond_this_machine_needs_keys() -> None:
    with pytest.raises(AddressError, match="keys"):
        main(["--listen", "ipc:///tmp/never-bound", "--replica", "tcp://192.0.2.1:5555"])
