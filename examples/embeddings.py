"""Vectors and scores. The demo model works; a model made for it, such as all-MiniLM-L6-v2, gives better ones."""

import sys

from engine_core import LLM

TEXTS = ["The sky is blue.", "The sky is blue today.", "Bread is baked in an oven."]


def main() -> None:
    """Print the size of a vector and two similarities."""
    model = {"model": sys.argv[1]} if len(sys.argv) > 1 else {}
    with LLM(runner="pooling", max_model_len=2048, **model) as llm:
        print("numbers in a vector:", len(llm.embed(TEXTS, use_tqdm=False)[0].outputs.embedding))
        for text, output in zip(TEXTS[1:], llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False), strict=True):
            print(f"{output.outputs.score:.3f}  {text}")


if __name__ == "__main__":
    main()
