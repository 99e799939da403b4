"""langchain-community: its class VLLM, one prompt, several, and stop strings."""

import os

from langchain_community.llms import VLLM

llm = VLLM(
    model=os.environ["MODEL"],
    trust_remote_code=True,  # as its page has it
    max_new_tokens=8,
    temperature=0,
    vllm_kwargs={"max_model_len": 256, "swap_space": 1},
)
assert "Paris" in llm.invoke("The capital of France is")
two = llm.batch(["The capital of France is", "Name a colour:"], stop=["."])
assert two[0] == " Paris"
assert len(two) == 2
