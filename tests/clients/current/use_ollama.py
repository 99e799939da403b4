"""ollama: list, show, chat and generate, whole and streamed."""

import os

import ollama

client = ollama.Client(host=os.environ["SERVER"])
MODEL = os.environ["MODEL"]
assert MODEL in [model.model for model in client.list().models]
assert client.show(MODEL).details is not None
messages = [{"role": "user", "content": "Name three colours."}]
options = {"temperature": 0, "num_predict": 24}
whole = client.chat(MODEL, messages=messages, options=options)
parts = list(client.chat(MODEL, messages=messages, options=options, stream=True))
assert "".join(part.message.content for part in parts) == whole.message.content
assert parts[-1].done
assert parts[-1].eval_count == whole.eval_count
answer = client.generate(MODEL, prompt="The capital of France is", options=options, raw=True)
assert answer.response.strip()
