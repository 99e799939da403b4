"""langchain-openai: invoke, stream and batch of ChatOpenAI; OpenAI for completions."""

import os

from langchain_openai import ChatOpenAI, OpenAI

options = {"base_url": os.environ["BASE_URL"], "api_key": "none", "model": os.environ["MODEL"], "temperature": 0}
model = ChatOpenAI(**options, max_tokens=24, stream_usage=True)
whole = model.invoke("Name three colours.")
parts = list(model.stream("Name three colours."))
assert "".join(part.content for part in parts) == whole.content
assert whole.usage_metadata["output_tokens"] == sum(
    (part.usage_metadata or {}).get("output_tokens", 0) for part in parts
)
first, second = model.batch(["Say hello.", "Name three colours."])
assert second.content == whole.content
assert first.content
assert OpenAI(**options, max_tokens=8).invoke("The capital of France is").strip()
