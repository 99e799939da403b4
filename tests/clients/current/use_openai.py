"""openai: chat and completions, streamed and not, log probabilities, errors by their types."""

import asyncio
import os

import openai

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
HELLO = [{"role": "user", "content": "Say hello."}]


def chat(client: openai.OpenAI) -> str:
    """A streamed answer is the answer that is not streamed, token by token."""
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0)
    text, usage, num_logprobs = "", None, 0
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            num_logprobs += len(choice.logprobs.content or []) if choice.logprobs else 0
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == num_logprobs == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    return text


def completions(client: openai.OpenAI) -> None:
    """Two prompts with two choices each are four choices, in order, each with its prompt before it."""
    prompts = ["The capital of France is", "1, 2, 3,"]
    arguments = {"max_tokens": 8, "n": 2, "temperature": 0.7, "seed": 3, "logprobs": 2, "echo": True}
    answer = client.completions.create(model=MODEL, prompt=prompts, **arguments)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(prompts[i // 2]) for i, choice in enumerate(answer.choices)] == [True] * 4
    assert answer == client.completions.create(model=MODEL, prompt=prompts, **arguments).model_copy(
        update={"id": answer.id, "created": answer.created, "usage": answer.usage}
    )


def refused(client: openai.OpenAI) -> None:
    """Errors have the client's types, and texts that say what would be right."""
    for error, arguments in (
        (openai.NotFoundError, {"model": "nope", "messages": HELLO}),
        (openai.BadRequestError, {"model": MODEL, "messages": HELLO, "max_tokens": -3}),
        (openai.BadRequestError, {"model": MODEL, "messages": [{"role": "user", "content": "x " * 20_000}]}),
    ):
        try:
            client.chat.completions.create(**arguments)
        except error:
            continue
        raise AssertionError(f"accepted: {str(arguments)[:80]}")


async def many() -> None:
    """Sixteen streams at once give what each gives alone."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="none") as client:

        async def one(number: int) -> str:
            text = ""
            async for chunk in await client.completions.create(
                model=MODEL, prompt=f"{number} and", max_tokens=12, temperature=0.8, seed=number, stream=True
            ):
                text += chunk.choices[0].text if chunk.choices else ""
            return text

        together = await asyncio.gather(*[one(number) for number in range(16)])
        assert [await one(number) for number in (0, 7, 15)] == [together[0], together[7], together[15]]


with openai.OpenAI(base_url=URL, api_key="none") as sync:
    assert MODEL in [model.id for model in sync.models.list()]
    chat(sync)
    completions(sync)
    refused(sync)
asyncio.run(many())
