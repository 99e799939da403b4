"""openai-agents: an agent that has to call a tool first, on chat completions, whole and streamed."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none")
asked: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return "It is sunny."


agent = Agent(
    name="helper",
    instructions="You answer briefly.",
    tools=[get_weather],
    tool_use_behavior="stop_on_first_tool",
    model=OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=client),
    model_settings=ModelSettings(max_tokens=64, temperature=0, tool_choice="required", parallel_tool_calls=False),
)


async def main() -> None:
    """The tool is called with the same arguments, streamed or not."""
    whole = await Runner.run(agent, "What is the weather in Paris?")
    streamed = Runner.run_streamed(agent, "What is the weather in Paris?")
    async for _ in streamed.stream_events():
        pass
    assert whole.final_output == streamed.final_output == "It is sunny."
    assert len(asked) == 2
    assert asked[0] == asked[1]


asyncio.run(main())
