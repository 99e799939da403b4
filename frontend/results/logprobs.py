"""Log probabilities in the form for callers: one dict for each position, as in vLLM."""

from collections.abc import Iterator, Sequence

from frontend.client.received_logprobs import PositionLogprobs
from frontend.results.outputs import Logprob, TokenLogprobs
from frontend.text.token_texts import TokenTexts


def each_logprobs(positions: Sequence[PositionLogprobs], texts_of: TokenTexts | None) -> Iterator[TokenLogprobs]:
    """Yield one dict for each position, as in vLLM.

    The position's own token comes first with its rank, then the most likely ones with theirs. texts_of: None = without
    texts.
    """
    for rank, token_ids, values in positions:
        ids = token_ids.tolist()
        texts = texts_of.take(ids) if texts_of is not None else [None] * len(ids)
        ranks = (rank, *range(1, len(ids)))
        rows = zip(ids, values.tolist(), ranks, texts, strict=True)
        yield {token: Logprob(value, place, text) for token, value, place, text in rows}
