"""langchain-openai: tools that must be called, whole and streamed, and an answer by a tool."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


@tool
def get_weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    return f"sun in {city} for {days} days"


class Verdict(BaseModel):
    """Whether something is good."""

    good: bool
    points: int = Field(ge=0, le=9)


model = ChatOpenAI(
    base_url=os.environ["BASE_URL"],
    api_key="none",
    model=os.environ["MODEL"],
    temperature=0,
    max_tokens=96,
    max_retries=0,
)
bound = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
question = HumanMessage("What is the weather in Paris for 2 days?")
whole = bound.invoke([question])
(call,) = whole.tool_calls
assert call["name"] == "get_weather"
assert set(call["args"]) == {"city", "days"}
chunks = list(bound.stream([question]))
total = chunks[0]
for chunk in chunks[1:]:
    total = total + chunk
assert total.tool_calls[0]["args"] == call["args"]
result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
assert model.bind_tools([get_weather]).invoke([question, whole, result]).content is not None
verdict = model.with_structured_output(Verdict, method="function_calling").invoke("Is the sky blue?")
assert isinstance(verdict, Verdict)
