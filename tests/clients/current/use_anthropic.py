"""anthropic: messages, whole and streamed, and the count of a prompt's tokens."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["SERVER"], api_key="none")
arguments = {
    "model": os.environ["MODEL"],
    "system": "You answer briefly.",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 24,
    "temperature": 0,
}
whole = client.messages.create(**arguments)
with client.messages.stream(**arguments) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text
assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
counted = client.messages.count_tokens(**{name: arguments[name] for name in ("model", "system", "messages")})
assert counted.input_tokens == whole.usage.input_tokens
