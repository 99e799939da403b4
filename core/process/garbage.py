"""settle_garbage: the garbage collector's settings of a process that serves, an engine's or a router's."""

import gc

#: Objects, then collections of the generation before. With Python's own numbers (700, 10, 10) some thousand requests
#: that arrive at once bring about full collections, each of which stops both threads for 60 ms beside 20,000 requests.
_THRESHOLDS = 700, 10, 200


def settle_garbage() -> None:
    """Keep all objects of the start for ever, and collect others seldom. Called before the first request."""
    gc.collect()  # of an engine only objects made after the imports: under a millisecond
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
