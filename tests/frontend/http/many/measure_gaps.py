"""`python -m tests.frontend.http.many.measure_gaps`: the longest gap of one model's stream while another one loads.

Both have the demo model's weights. The first is measured alone, then while the second is loaded and unloaded five
times. It also prints how long a request for the second one takes, from its first byte sent to its first token.
"""

import statistics
import tempfile
import threading
import time
from pathlib import Path

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.many.test_many_models import Stream

_TABLE = '[models.{name}]\nmodel = "{model}"\nkv_cache_memory_bytes = "64M"\nkeep_alive = 0\n'


def main() -> None:
    """Print the gaps in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "models.toml")
        path.write_text("".join(_TABLE.format(name=name, model=resolve_model(None)) for name in ("a", "b")))
        with serving("--models", str(path)) as caller:
            alone = Stream(caller, "a", 600)
            alone.read()
            stream, waits, gaps = Stream(caller, "a", 2000), list[float](), list[float]()
            other = threading.Thread(target=_load_often, args=(caller, waits))
            stream.read(20)
            other.start()
            while other.is_alive():
                stream.read(1)
                gaps.append(stream.longest_gap_s)
                if stream.is_ended:
                    stream = Stream(caller, "a", 2000)
            stream.close()
            print(f"longest gap alone: {alone.longest_gap_s * 1000:.0f} ms")
            print(f"longest gap while the other one loads: {max(gaps) * 1000:.0f} ms")
            print(f"first token of a model that is not loaded: {statistics.median(waits) * 1000:.0f} ms (median of 5)")


def _load_often(caller: Caller, waits: list[float]) -> None:
    for _ in range(5):
        begin = time.monotonic()
        stream = Stream(caller, "b", 8)
        while not stream.read(1):
            pass
        waits.append(time.monotonic() - begin)
        stream.read()
        time.sleep(1.0)


if __name__ == "__main__":
    main()
