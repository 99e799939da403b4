"""Reinforcement learning on a CPU: the engine draws the rollouts, torch makes the updates, the weights move over.

`python policy_gradient.py [UPDATES]` trains a tiny Llama to say one token often (REINFORCE with a baseline). After each
update the engine gets the new weights. The log probabilities that it reports with its rollouts are compared, bit for
bit, with those that it computes for the same tokens as a prompt: with other engines these differ. It needs torch and
transformers.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core import LLM, SamplingParams

WANTED, VOCABULARY, PROMPT = 7, 64, [1, 2, 3]
NUM_ROLLOUTS, LENGTH = 16, 12


def tiny_model() -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=64, bos_token_id=None, eos_token_id=0)
    return LlamaForCausalLM(config)


def rollouts(llm: LLM, seed: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens that the engine draws, and their log probabilities."""
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=seed, ignore_eos=True, logprobs=0, n=NUM_ROLLOUTS)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    tokens = [choice.token_ids for choice in output.outputs]
    logprobs = [
        [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        for choice in output.outputs
    ]
    return tokens, logprobs


def teacher_forced(llm: LLM, tokens: list[list[int]]) -> list[list[float]]:
    """Return the log probabilities of the same tokens, computed as parts of prompts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": PROMPT + one} for one in tokens]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[len(PROMPT) :], one, strict=True)]
        for output, one in zip(outputs, tokens, strict=True)
    ]


def loss_of(model: LlamaForCausalLM, tokens: list[list[int]], rewards: torch.Tensor) -> torch.Tensor:
    """Return REINFORCE's loss: minus the mean of advantage times log probability."""
    ids = torch.tensor([PROMPT + one for one in tokens])
    logits = model(ids).logits[:, len(PROMPT) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, len(PROMPT) :, None])[..., 0]
    return -((rewards - rewards.mean())[:, None] * logprobs).mean()


def main() -> None:
    """Train, and print the share of wanted tokens before and after, and how many log probabilities differed."""
    num_updates = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    model, differing, shares = tiny_model(), 0, []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64) as llm:
            for update in range(num_updates):
                tokens, logprobs = rollouts(llm, seed=update)
                differing += sum(
                    one != other
                    for pair in zip(logprobs, teacher_forced(llm, tokens), strict=True)
                    for one, other in zip(*pair, strict=True)
                )
                rewards = torch.tensor([one.count(WANTED) / LENGTH for one in tokens])
                shares.append(rewards.mean().item())
                optimizer.zero_grad()
                loss_of(model, tokens, rewards).backward()
                optimizer.step()
                mark = llm.update_weights(model.state_dict().items())
    print(f"share of token {WANTED}: {shares[0]:.2f} at first, {shares[-1]:.2f} after {mark.version} updates")
    print(f"{differing} of {num_updates * NUM_ROLLOUTS * LENGTH} log probabilities differed")


if __name__ == "__main__":
    main()
