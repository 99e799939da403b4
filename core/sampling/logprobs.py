"""Log probabilities of a token and of the most likely tokens of its row; a row's bits do not depend on other rows."""

import numpy as np
import torch

from core.execution.plan import LogprobColumns
from ipc.arrays import AnyInts, Doubles, Ints, Positions, Rows

#: Block size of sums over the vocabulary. torch splits the sum of one long row between threads, but not of many rows,
#: so a whole row's sum would depend on the number of rows.
_SUM_BLOCK = 4096


@torch.inference_mode()
def gather_logprobs(
    logits: torch.Tensor,
    tokens: AnyInts,
    num_top: AnyInts,
    rows: Rows,
    positions: Positions,
    *,
    normalized: bool = True,
) -> LogprobColumns:
    """Return the log probabilities of each row's token and of its most likely tokens.

    logits [L, V] float32; tokens [L] int; num_top [L] int: how many of the most likely tokens, at most V. rows,
    positions [L]: copied to the result. normalized: values are log probabilities; otherwise the logits unchanged.

    A row's entries are its token first, then its most likely tokens in descending order, ties by lower id. The token's
    rank is the number of tokens at least as likely, as in vLLM.
    """
    logits, vocab_size = logits.cpu(), logits.shape[1]
    chosen = logits.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])
    ranks = (logits >= chosen).sum(-1)
    base = _log_totals(logits) if normalized else np.zeros(len(logits))
    width = np.minimum(num_top, vocab_size)
    entry_row = [np.arange(len(tokens))]  # row of every entry; entry_token: its token
    entry_token = [tokens.astype(np.int64)]
    for count in np.unique(width[width > 0]).tolist():
        part = np.flatnonzero(width == count)
        row, token = _most_likely(logits[torch.from_numpy(part)], count)
        entry_row.append(part[row])
        entry_token.append(token)
    row, token = np.concatenate(entry_row), np.concatenate(entry_token)
    order = np.argsort(row, kind="stable")
    row, token = row[order], token[order]
    values = logits[torch.from_numpy(row), torch.from_numpy(token)].double().numpy() - base[row]
    return LogprobColumns(
        rows=rows.astype(np.int32),
        positions=positions.astype(np.int32),
        counts=np.bincount(row, minlength=len(tokens)).astype(np.int32),
        ranks=ranks.numpy().astype(np.int32),
        token_ids=token.astype(np.int32),
        values=values.astype(np.float32),
    )


def _most_likely(logits: torch.Tensor, count: int) -> tuple[Ints, Ints]:
    """Return (row, token) of the count largest logits of each row, in descending order, ties by lower id.

    torch's topk does not define which of several equal values it takes, and bfloat16 models have many.
    """
    last = logits.topk(count, dim=-1).values[:, -1:]
    row, token = (part.numpy() for part in torch.nonzero(logits >= last, as_tuple=True))
    order = np.lexsort((token, -logits[torch.from_numpy(row), torch.from_numpy(token)].numpy(), row))
    row, token = row[order], token[order]
    first = np.searchsorted(row, np.arange(len(logits)))
    kept = np.arange(len(row)) - first[row] < count
    return row[kept], token[kept]


def _log_totals(logits: torch.Tensor) -> Doubles:
    """Return log(sum(exp(logits))) of each row [L], float64."""
    maximum = logits.max(-1, keepdim=True).values
    weights = (logits - maximum).exp_()
    blocks = [block.sum(-1, dtype=torch.float64) for block in torch.split(weights, _SUM_BLOCK, dim=-1)]
    totals: Doubles = (torch.stack(blocks, -1).cumsum(-1)[:, -1].log() + maximum[:, 0]).numpy()
    return totals
