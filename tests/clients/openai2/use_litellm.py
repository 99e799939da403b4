"""litellm with openai 2: completion, whole and streamed, and the proxy's model prefix."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network first

import litellm

litellm.telemetry = False
arguments = {
    "model": f"hosted_vllm/{os.environ['MODEL']}",
    "api_base": os.environ["BASE_URL"],
    "api_key": "none",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 24,
    "temperature": 0,
}
whole = litellm.completion(**arguments)
text = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**arguments, stream=True))
assert text == whole.choices[0].message.content
assert whole.usage.completion_tokens > 0
