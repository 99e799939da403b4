"""openai: the Responses API, whole and streamed; a function that must be called; a parsed answer."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
model = os.environ["MODEL"]
asked = {"model": model, "instructions": "Be brief.", "input": "Name three colours.", "temperature": 0}
whole = client.responses.create(**asked, max_output_tokens=24)
assert whole.output_text
assert whole.usage.output_tokens > 0
with client.responses.stream(**asked, max_output_tokens=24) as stream:
    events = list(stream)
text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
final = events[-1].response
assert events[-1].type == f"response.{final.status}"  # incomplete, if the answer is cut at the limit
assert text == whole.output_text == final.output_text
assert final.usage.output_tokens == whole.usage.output_tokens

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
tool = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": schema, "strict": True}
question = {"role": "user", "content": "What is the weather in Paris?"}
forced = {"model": model, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
called = client.responses.create(input=[question], **forced)
(call,) = called.output
assert set(json.loads(call.arguments)) == {"city"}
with client.responses.stream(input=[question], **forced) as stream:
    for _ in stream:
        pass
    assert stream.get_final_response().output[0].arguments == call.arguments
result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
assert client.responses.create(model=model, input=[question, call, result], tools=[tool], max_output_tokens=8).output


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


parsed = client.responses.parse(model=model, input="The colour of the sky?", text_format=Colour, max_output_tokens=40)
assert isinstance(parsed.output_parsed, Colour)
