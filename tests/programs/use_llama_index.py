"""llama-index-llms-vllm: its class Vllm, a completion and a chat."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.vllm import Vllm

llm = Vllm(
    model=os.environ["MODEL"],
    tensor_parallel_size=1,
    max_new_tokens=8,
    temperature=0,
    vllm_kwargs={"swap_space": 1, "gpu_memory_utilization": 0.5, "max_model_len": 256},
)
assert "Paris" in llm.complete("The capital of France is").text
assert llm.chat([ChatMessage(role="user", content="Say hello.")]).message.content
