"""pydantic-ai-slim: an agent's answer as text, whole and streamed."""

import asyncio
import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(os.environ["MODEL"], provider=OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none"))
agent = Agent(model, model_settings={"max_tokens": 24, "temperature": 0})


async def main() -> None:
    """A streamed answer is the answer that is not streamed."""
    whole = await agent.run("Name three colours.")
    async with agent.run_stream("Name three colours.") as result:
        *_, last = [text async for text in result.stream_text(debounce_by=None)]
    assert last == whole.output
    assert whole.usage.output_tokens > 0 if not callable(whole.usage) else whole.usage().output_tokens > 0


asyncio.run(main())
