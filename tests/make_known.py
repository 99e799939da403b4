"""Make docs/known_models.md from the rows of the architectures. `make map` writes it."""

from pathlib import Path

from core.model_files.known_models import known_models

PAGE = Path(__file__).resolve().parent.parent / "docs" / "known_models.md"
_HEAD = """# Known models

The models that run on this engine's own code, one row for each name in `config.json`. `engine-core list --known`
prints the same table, and `--json` one object a line. `make map` makes this page from the rows of the architectures; a
test compares them. [models.md](models.md) says what each one needs, and which test proves it.

- **images**: images in requests are read. Models whose text runs alone refuse requests with images.
- **adapters**: which matrices LoRA may change.
- **MTP**: files may have layers for multi-token prediction, or there are assistants; both can draft
  ([speculation.md](speculation.md)).
- **level**: the numerics level on a CPU. All run on an NVIDIA GPU, too ([gpu.md](gpu.md)).

| models | architecture | files | images | adapters | MTP | level |
|---|---|---|---|---|---|---|
"""


def made() -> str:
    """Return the page."""
    rows = []
    for one in known_models():
        words = ["yes" if value else "no" for value in (one.images, one.mtp)]
        cells = (one.models, one.architecture, one.files, words[0], one.adapters, *words[1:], one.level)
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(made())
