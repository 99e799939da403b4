"""openai-agents: an agent on chat completions, whole and streamed."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none")
agent = Agent(
    name="helper",
    instructions="You answer briefly.",
    model=OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=client),
    model_settings=ModelSettings(max_tokens=24, temperature=0),
)


async def main() -> None:
    """A streamed answer is the answer that is not streamed."""
    whole = await Runner.run(agent, "Name three colours.")
    streamed = Runner.run_streamed(agent, "Name three colours.")
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == whole.final_output
    assert whole.final_output


asyncio.run(main())
