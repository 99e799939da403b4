"""settle_garbage: the garbage collector's settings in a process that serves, an engine's or a router's."""

import gc

#: Objects, then collections of the previous generation. With Python's defaults (700, 10, 10), a few thousand requests
#: that arrive at once trigger full collections, each of which stops both threads for 60 ms with 20,000 requests.
_THRESHOLDS = 700, 10, 200


def settle_garbage() -> None:
    """Keep all objects of the start forever, and collect others rarely. Called before the first request."""
    gc.collect()  # in an engine only objects created after the imports: under a millisecond
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
