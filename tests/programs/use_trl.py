"""TRL: GRPOTrainer in colocated mode, with and without sleep: rollouts of the engine, weights of the trainer."""

import os
import tempfile

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **_):
    return [sum(map(str.isalpha, text)) / 8 for text in completions]


tokenizer = AutoTokenizer.from_pretrained(os.environ["FOLDER"])
tokenizer.pad_token = tokenizer.eos_token
for sleeps in (False, True):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids, vocab_size=len(tokenizer), max_position_embeddings=128))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings = GRPOConfig(
            output_dir=f"{folder}/out",
            use_cpu=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=sleeps,
            vllm_max_model_length=64,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=8,
            max_steps=4,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        prompts = Dataset.from_dict({"prompt": ["a b c", "hello", "one two", "x"] * 4})
        trainer = GRPOTrainer(folder, reward, args=settings, train_dataset=prompts, processing_class=tokenizer)
        before = trainer.model.lm_head.weight.detach().clone()
        trainer.train()
        llm = trainer.vllm_generation.llm
        version = llm.statistics().weights_version
        losses = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert len(losses) == 4, trainer.state.log_history
        assert not torch.equal(before, trainer.model.lm_head.weight.detach()), "the trainer learns"
        assert version >= 3, "and the engine has its weights"
        print(sleeps, version, [round(entry["reward"], 3) for entry in losses])
