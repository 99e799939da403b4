"""receipt_of: the receipt of an answer that this session's engine has given."""

from collections.abc import Callable
from typing import TypeAlias

from frontend.client.client import EngineClient
from frontend.results.outputs import RequestOutput
from frontend.results.pooling_outputs import PooledAnswer
from ipc.errors import InvalidRequestError
from ipc.keys.signing import SigningKey
from ipc.params.sampling_params import RequestOutputKind
from ipc.records.receipt import Answered, Receipt, ids_bytes, make_receipt, make_vector_receipt
from ipc.wire.messages import AddRequest
from ipc.wire.pooling_messages import AddPooling

#: An answer that may have a receipt.
Answer: TypeAlias = RequestOutput | PooledAnswer


def receipt_of(
    client: EngineClient, output: Answer, key: SigningKey | None, derive_seed: Callable[[int], int]
) -> Receipt:
    """Return the receipt of a finished output. key: None = it is not signed.

    derive_seed: seed of the request with this number, if its parameters have none. Errors: InvalidRequestError.
    """
    if isinstance(output, PooledAnswer):
        return _of_vectors(client, output, key)
    if not isinstance(output, RequestOutput):
        raise InvalidRequestError(
            f"no receipt can be made of a {type(output).__name__}: receipts are of outputs of generate(), chat(), "
            "encode(), embed(), classify() and score()"
        )
    return _of_tokens(client, output, key, derive_seed)


def _of_tokens(
    client: EngineClient, output: RequestOutput, key: SigningKey | None, derive_seed: Callable[[int], int]
) -> Receipt:
    sent = output.submitted
    if sent is None or not output.finished:
        raise InvalidRequestError("no receipt can be made of this output: it is not that of a finished request")
    if sent.params.output_kind == RequestOutputKind.DELTA:
        raise InvalidRequestError(
            "no receipt can be made of the parts of an answer: use another output_kind than DELTA"
        )
    versions = {version for one in output.outputs for _, version in one.weights_versions or [(0, 0)]}
    if len(versions) > 1:
        raise InvalidRequestError(
            f"no receipt can be made of this output: the weights changed while it was computed: {sorted(versions)}"
        )
    seed = derive_seed(sent.number) if sent.seed is None else sent.seed
    uses = [one.use for one in sent.features]
    prompt = ids_bytes(output.prompt_token_ids)
    request = AddRequest(sent.number, prompt, sent.params, seed, adapter=sent.adapter, features=uses)
    answers = [Answered(one.token_ids, one.finish_reason) for one in output.outputs]
    return make_receipt(client.welcome_of(*versions), request, answers, key)


def _of_vectors(client: EngineClient, output: PooledAnswer, key: SigningKey | None) -> Receipt:
    sent = output.submitted
    if sent is None:
        raise InvalidRequestError(
            "no receipt can be made of this output: it is not the answer to one request. The cosine of two embeddings "
            "follows from them: make the receipts of both, from embed()"
        )
    prompt = ids_bytes(output.prompt_token_ids)
    request = AddPooling(
        0,
        prompt,
        sent.params,
        second_from=sent.second_from,
        adapter=sent.adapter,
        features=[one.use for one in sent.features],
    )
    return make_vector_receipt(client.welcome, request, output.vectors, key)  # weights of these engines are fixed
