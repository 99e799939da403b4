"""distilabel: its class vLLM, chats with log probabilities, and its unloading."""

import os

from distilabel.models.llms import vLLM

llm = vLLM(model=os.environ["MODEL"], extra_kwargs={"max_model_len": 256}, disable_cuda_device_placement=True)
llm.load()
chats = [[{"role": "user", "content": text}] for text in ("Say hello.", "Name a colour.")]
answers = llm.generate_outputs(inputs=chats, num_generations=2, max_new_tokens=8, temperature=0.7, logprobs=2)
assert [len(answer["generations"]) for answer in answers] == [2, 2]
assert all(answer["statistics"]["output_tokens"] for answer in answers)
assert answers[0]["logprobs"]
llm.unload()
