"""Why a model could not be downloaded from the Hub, and what to do, in words."""

import errno

from ipc.files.hub_name import HubName

#: Classes of the library by name, since they move between its modules; the more specific ones first.
_BY_CLASS = {
    "GatedRepoError": "the model is gated: accept its terms at {url}, then set HF_TOKEN or run `hf auth login`",
    "RepositoryNotFoundError": "the Hub knows no model of this name, or it is private: check the spelling at {url}; "
    "for a private one set HF_TOKEN or run `hf auth login`",
    "RevisionNotFoundError": "the model has no revision {revision}: {url}/tree/main shows those there are",
    "DisabledRepoError": "the Hub has disabled the model: {url} says why",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set: unset it, or run `hf download {repo}` where there is a network and "
    "copy the cache",
}
_BY_STATUS = {
    401: "the Hub refuses access: set HF_TOKEN to a token that is valid, or run `hf auth login`",
    403: "the Hub refuses access with this token: ask for it at {url}",
    404: "the Hub knows no model of this name: check the spelling at {url}",
    429: "the Hub limits the rate of requests: try again later, with HF_TOKEN set the limit is higher",
}
_NO_NETWORK = (
    "there is no connection to {endpoint}: try again; without a network run `hf download {repo}` on a machine that has "
    "one and copy the cache, or give a folder"
)


def explain(error: Exception, name: HubName, lacks: str) -> str:
    """Return a message on a download that failed with `error`. lacks: what the cache lacks, "" = nothing."""
    from huggingface_hub import constants

    reason = _reason(error)
    cause = _cause(error).format(
        url=f"{constants.ENDPOINT}/{name.repo}", endpoint=constants.ENDPOINT, repo=name.repo, revision=name.branch
    )
    if not lacks:
        return f"{name} is in the cache and was not brought up to date: {cause} ({reason})"
    return f"{name} was not downloaded: {cause}. It is no file or folder here, and {lacks} ({reason})"


def _cause(error: Exception) -> str:
    chain = list(_chain(error))
    for one in chain:
        kinds = [kind.__name__ for kind in type(one).__mro__]
        for name, text in _BY_CLASS.items():
            if name in kinds:
                return text
    for one in chain:
        status = getattr(getattr(one, "response", None), "status_code", 0)
        if status in _BY_STATUS:
            return _BY_STATUS[status]
        if status >= 500:
            return "the Hub has trouble of its own: try again later"
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return "the disk is full: `engine-core list` shows what is in the cache, `engine-core rm` frees it"
        if isinstance(one, PermissionError):
            return "the cache cannot be written: HF_HOME names another folder"
    is_connection = any(isinstance(one, OSError) or "Connect" in type(one).__name__ for one in chain)
    is_late = any("Timeout" in type(one).__name__ for one in chain)
    return _NO_NETWORK if is_connection or is_late else "`hf download {repo}` may say more"


def _chain(error: Exception) -> list[BaseException]:
    """Return the error and those it was raised for, the last one first: the library wraps a lost connection."""
    found: list[BaseException] = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found[::-1]


def _reason(error: Exception) -> str:
    """Return the first line of the original error."""
    first = _chain(error)[0]
    return f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]:.300}".rstrip(".")
