"""Several streams at once in one event loop. Leaving a stream early aborts its request."""

import asyncio

from engine_core import AsyncLLM, SamplingParams

BEGINNINGS = ["The sky is blue because", "The three primary colours are"]


async def first_sentence(llm: AsyncLLM, beginning: str) -> str:
    """Return how a sentence goes on. What would follow it is never computed."""
    text = ""
    async for output in llm.generate(beginning, SamplingParams(temperature=0, max_tokens=48)):
        text = output.outputs[0].text  # all of the text so far
        if "." in text:
            break
    return text.partition(".")[0]


async def main() -> None:
    """Run the streams at the same time and print the sentences."""
    llm = AsyncLLM(max_model_len=2048)
    try:
        endings = await asyncio.gather(*(first_sentence(llm, beginning) for beginning in BEGINNINGS))
    finally:
        llm.shutdown()
    for beginning, ending in zip(BEGINNINGS, endings, strict=True):
        print(f"{beginning}{ending}.")


if __name__ == "__main__":
    asyncio.run(main())
