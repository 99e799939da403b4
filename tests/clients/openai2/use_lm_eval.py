"""lm_eval: local-completions and local-chat-completions; log likelihoods equal those of the embedded LLM."""

import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import lm_eval

SERVER, MODEL = os.environ["SERVER"], os.environ["MODEL"]
ROWS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " a dog"], "answer": 0},
    {"question": "Two and two is", "choices": [" seven", " four", " Paris"], "answer": 1},
    {"question": "Cats and dogs are", "choices": [" numbers", " animals", " cities"], "answer": 1},
    {"question": "The sun rises in the", "choices": [" cellar", " evening", " morning"], "answer": 2},
]
#: Sums of the log probabilities of each continuation, by the embedded LLM on the same token ids.
EMBEDDED = """
import json, sys
from engine_core import LLM, SamplingParams
pairs = json.load(sys.stdin)
with LLM() as llm:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([whole for _, whole in pairs], params, use_tqdm=False)
sums = []
for (start, whole), output in zip(pairs, outputs):
    steps = zip(whole[start:], output.prompt_logprobs[start:])
    sums.append(sum(entry[token].logprob for token, entry in steps))
print(json.dumps(sums))
"""


def tokens(text: str) -> list[int]:
    """Return the server's token ids of a text, without special tokens."""
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{SERVER}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[int] = json.load(answer)["tokens"]
        return found


def evaluate(model: str, path: str, task: dict[str, object], **arguments: object) -> dict[str, object]:
    """Run one task against the server, with its samples."""
    options = {"model": MODEL, "base_url": f"{SERVER}/v1/{path}", "num_concurrent": 4, **arguments}
    found: dict[str, object] = lm_eval.simple_evaluate(
        model=model, model_args=options, tasks=[task], log_samples=True, apply_chat_template="chat" in path
    )
    return found


with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(data)},
        "test_split": "train",
        "doc_to_text": "{{question}}",
    }
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", **common}
    choose |= {"doc_to_target": "{{answer}}", "target_delimiter": ""}
    samples = evaluate("local-completions", "completions", choose)["samples"]["choose"]
    got = [sum_ for sample in samples for ((sum_, _),) in sample["resps"]]
    pairs = []
    for sample in samples:
        row = sample["doc"]
        start = len(tokens(row["question"]))
        pairs.extend((start, tokens(row["question"] + choice)) for choice in row["choices"])
    command = [os.environ["ENGINE_PYTHON"], "-c", EMBEDDED]
    given, root = json.dumps(pairs), os.environ["ROOT"]
    run = subprocess.run(command, input=given, capture_output=True, text=True, timeout=200, cwd=root)
    assert run.returncode == 0, run.stderr
    expected = json.loads(run.stdout)
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) < 1e-9, (got, expected)

    answer = {"task": "answer", "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}", **common}
    answer |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]}
    for model, path in (("local-completions", "completions"), ("local-chat-completions", "chat/completions")):
        for sample in evaluate(model, path, answer)["samples"]["answer"]:
            assert isinstance(sample["resps"][0][0], str)
