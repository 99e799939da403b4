"""A question about an image: `python images.py IMAGE [MODEL]`. Needs the extra [vision]."""

import sys

from engine_core import LLM, SamplingParams


def main() -> None:
    """Print the answer to a question about an image."""
    if len(sys.argv) < 2:
        sys.exit("usage: python images.py IMAGE [MODEL]")
    model = sys.argv[2] if len(sys.argv) > 2 else "HuggingFaceTB/SmolVLM-256M-Instruct"
    question = {"type": "text", "text": "What is in this picture?"}
    content = [{"type": "image", "image": sys.argv[1]}, question]
    with LLM(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=32)
        print(llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
