"""lm_eval: its model `vllm`, multiple choice, likelihoods and generation; sums equal those of LLM.generate().

Its results on the tasks of `engine-core eval-check` are those of that command, bit for bit, at several batch sizes.
"""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
import msgspec
from lm_eval.models.vllm_causallms import VLLM
from lm_eval.tasks import TaskManager

from tools.lab.eval_check import Sample, evaluate
from tools.lab.eval_tasks import TASKS, write_tasks

MODEL = os.environ["FOLDER"]  # of a model with tokenizer.json
ROWS = [
    {"question": "the cat is", "choices": [" here", " a dog", " gone away"], "answer": 0},
    {"question": "two and two is", "choices": [" seven", " four", " the cat"], "answer": 1},
]

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}, "test_split": "train"}
    common |= {"doc_to_text": "{{question}}"}
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", **common}
    choose |= {"doc_to_target": "{{answer}}", "target_delimiter": ""}
    rolling = {"task": "rolling", "output_type": "loglikelihood_rolling", **common, "doc_to_text": ""}
    rolling |= {"doc_to_target": "{{question}}", "metric_list": [{"metric": "word_perplexity"}]}
    answer = {"task": "answer", "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}", **common}
    answer |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]}
    model = VLLM(pretrained=MODEL, dtype="float32", max_model_len=160, gpu_memory_utilization=0.8)
    found = lm_eval.simple_evaluate(model=model, tasks=[choose, rolling, answer], log_samples=True)
    samples = found["samples"]
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples["answer"])
    assert all(sample["resps"][0][0] < 0 for sample in samples["rolling"])
    got = [sum_ for sample in samples["choose"] for ((sum_, _),) in sample["resps"]]

    from vllm import SamplingParams  # what a user of vLLM writes

    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    for sample, row in zip(samples["choose"], ROWS, strict=True):
        for choice, ((sum_, _),) in zip(row["choices"], sample["resps"], strict=True):
            start, whole = (model.tokenizer(text).input_ids for text in (row["question"], row["question"] + choice))
            (output,) = model.model.generate({"prompt_token_ids": whole}, params, use_tqdm=False)
            steps = zip(whole[len(start) :], output.prompt_logprobs[len(start) :], strict=True)
            assert sum(entry[token].logprob for token, entry in steps) == sum_
    assert len(got) == 6

    write_tasks(Path(folder, "tasks"))
    _, result = evaluate("plain", 8, {"model": MODEL, "dtype": "float32"})
    wanted = msgspec.json.Decoder(Sample).decode_lines(result)
    for batch_size in ("auto", 1, 8):
        model.batch_size = batch_size
        tasks = [f"engine_core_{task.name}" for task in TASKS]
        manager = TaskManager(include_path=str(Path(folder, "tasks")))
        samples = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, log_samples=True)["samples"]
        for task in TASKS:
            ours = [sample for sample in wanted if sample.task == task.name]
            documents = sorted(samples[f"engine_core_{task.name}"], key=lambda sample: sample["doc_id"])
            theirs = [response[0] for sample in documents for response in sample["resps"]]
            if task.form == "generate_until":
                assert theirs == [sample.text for sample in ours], (task.name, theirs, ours)
            elif task.form == "loglikelihood_rolling":
                assert theirs == [sample.sum for sample in ours], (task.name, theirs, ours)
            else:
                assert theirs == [(sample.sum, sample.is_greedy) for sample in ours], (task.name, theirs, ours)
