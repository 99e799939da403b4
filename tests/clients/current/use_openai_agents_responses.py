"""openai-agents: its default, an agent on the Responses API, with a tool and a typed result, whole and streamed."""

import asyncio
import os
from typing import Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none")
model = OpenAIResponsesModel(model=os.environ["MODEL"], openai_client=client)


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "It is sunny."


forced = ModelSettings(max_tokens=64, temperature=0, tool_choice="required", parallel_tool_calls=False)
caller = Agent(
    name="caller",
    instructions="You answer briefly.",
    tools=[get_weather],
    tool_use_behavior="stop_on_first_tool",
    model=model,
    model_settings=forced,
)
typed = Agent(name="typed", output_type=Colour, model=model, model_settings=ModelSettings(max_tokens=40, temperature=0))


async def main() -> None:
    """Streamed or not, the results are the same."""
    assert (await Runner.run(caller, "What is the weather in Paris?")).final_output == "It is sunny."
    streamed = Runner.run_streamed(caller, "What is the weather in Paris?")
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == "It is sunny."
    whole = await Runner.run(typed, "What is the colour of the sky?")
    assert isinstance(whole.final_output, Colour)


asyncio.run(main())
