"""anthropic: messages, whole and streamed; tools; the number of tokens."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["SERVER"], api_key="none", max_retries=0)
model = os.environ["MODEL"]
messages = [{"role": "user", "content": "Name three colours."}]
greedy = {"extra_body": {"temperature": 0}}  # this version of the client has no such argument
brief = {"model": model, "system": "Be brief.", "messages": messages}
whole = client.messages.create(max_tokens=24, **brief, **greedy)
assert whole.content[0].type == "text"
assert whole.usage.output_tokens > 0
with client.messages.stream(max_tokens=24, **brief, **greedy) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text == final.content[0].text
assert final.stop_reason == whole.stop_reason
assert final.usage.output_tokens == whole.usage.output_tokens
count = client.messages.count_tokens(**brief)
cached = (whole.usage.cache_creation_input_tokens or 0) + (whole.usage.cache_read_input_tokens or 0)
assert count.input_tokens == whole.usage.input_tokens + cached

tool = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
asked = {"model": model, "max_tokens": 96, **greedy, "tools": [tool], "tool_choice": {"type": "any"}}
asked["tool_choice"]["disable_parallel_tool_use"] = True
question = {"role": "user", "content": "What is the weather in Paris?"}
called = client.messages.create(messages=[question], **asked)
assert called.stop_reason == "tool_use"
(block,) = called.content
assert set(block.input) == {"city"}
with client.messages.stream(messages=[question], **asked) as stream:
    for _ in stream:
        pass
    assert stream.get_final_message().content[0].input == block.input
result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}]}
history = [question, {"role": "assistant", "content": called.content}, result]
assert client.messages.create(model=model, max_tokens=8, tools=[tool], messages=history).content

text = ""
try:
    client.messages.create(model="nobody", max_tokens=8, messages=messages)
except anthropic.NotFoundError as error:
    text = error.message
assert "nobody" in text
