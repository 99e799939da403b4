"""pydantic-ai-slim: a typed answer, which it asks for by a tool that must be called."""

import asyncio
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    warmth: int


model = OpenAIChatModel(os.environ["MODEL"], provider=OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none"))
agent = Agent(model, output_type=Colour, model_settings={"max_tokens": 96, "temperature": 0})


async def main() -> None:
    """A streamed answer is the answer that is not streamed."""
    whole = await agent.run("What is the colour of the sky?")
    assert isinstance(whole.output, Colour)
    async with agent.run_stream("What is the colour of the sky?") as result:
        assert await result.get_output() == whole.output


asyncio.run(main())
