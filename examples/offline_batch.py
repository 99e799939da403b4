"""Many prompts in one process: results in the order of the prompts, and options for each prompt."""

from engine_core import LLM, SamplingParams

PROMPTS = {
    "The capital of France is": SamplingParams(temperature=0, max_tokens=8),
    "Once upon a time": SamplingParams(temperature=0.8, seed=7, max_tokens=24),
    "One, two, three,": SamplingParams(temperature=0, max_tokens=24, stop=["six"]),
}


def main() -> None:
    """Ask all prompts at once and print the answers."""
    with LLM(max_model_len=2048) as llm:
        for output in llm.generate(list(PROMPTS), list(PROMPTS.values()), use_tqdm=False):
            answer = output.outputs[0]
            print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
