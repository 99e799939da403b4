"""Receipts: the receipts of one reply's tokens, a receipt for each prompt (docs/receipts.md)."""

import secrets
from collections.abc import Sequence

from frontend.client.client import EngineClient
from frontend.session import PreparedRequest
from ipc.errors import InvalidRequestError
from ipc.keys.signing import SigningKey
from ipc.records.receipt import Answered, Receipt, check_provable, ids_bytes, make_receipt
from ipc.wire.messages import AddRequest


class Receipts:
    """Made before the requests are submitted. key: signs the receipts; None = they are not signed.

    Errors: InvalidRequestError, if there can be none.
    """

    def __init__(self, client: EngineClient, key: SigningKey | None, prepared: Sequence[PreparedRequest]) -> None:
        check_provable(client.welcome)
        self._client, self._key, self._version = client, key, client.weights_version
        self._requests = [_request(one) for one in prepared]

    def of(self, answers: Sequence[Sequence[Answered]]) -> list[Receipt]:
        """Return the receipts of the choices of each prompt, which have ended. Errors: InvalidRequestError."""
        if self._client.weights_version != self._version:
            raise InvalidRequestError(
                "no receipt can be made of this answer: the weights changed while it was computed"
            )
        welcome = self._client.welcome_of(self._version)
        return [make_receipt(welcome, *one, self._key) for one in zip(self._requests, answers, strict=True)]


def with_seeds(prepared: Sequence[PreparedRequest]) -> list[PreparedRequest]:
    """Return requests whose answers are to have receipts, each with a seed, which its receipt says."""
    return [
        one if one.params.seed is not None else one._replace(params=one.params.changed(seed=secrets.randbits(64)))
        for one in prepared
    ]


def _request(prepared: PreparedRequest) -> AddRequest:
    prompt, params = prepared.prompt, prepared.params
    assert params.seed is not None, "with_seeds() draws one"
    uses = [one.use for one in prompt.features]
    return AddRequest(0, ids_bytes(prompt.token_ids), params, params.seed, adapter=prepared.adapter, features=uses)
