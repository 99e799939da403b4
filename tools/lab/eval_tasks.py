"""The tasks of `engine-core eval-check`: small ones of our own in lm_eval's forms, and their files for lm_eval."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Most tokens of a generated answer.
MOST_NEW_TOKENS = 32
UNTIL = "\n"

_CITIES = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Peru": "Lima",
}
_SENTENCES = (
    ("She opened the door with her", "key"),
    ("Bees make honey, and cows give", "milk"),
    ("In winter it is cold, in summer it is", "hot"),
    ("The opposite of day is", "night"),
    ("One, two, three, four,", "five"),
    ("He read the last page and closed the", "book"),
    ("The sun rises in the", "east"),
    ("Water freezes and becomes", "ice"),
)
_TEXTS = (
    "The lighthouse keeper climbed the stairs every evening and lit the lamp.",
    "A small boat came into the harbour, and no one on the pier knew its name.",
    "Bread needs flour, water, salt and time; most of all it needs time.",
    "When the rain stopped, the children ran out to look for the rainbow.",
)
_LINES = (
    "red blue green black white pink brown gold",
    "one two six four ten three five nine",
    "cat dog cow pig hen fox owl bee",
    "salt rice milk corn tea oil egg ham",
    "sun moon rain snow wind fog hail ice",
    "king page horse sword crown gate tower moat",
)


class Document(NamedTuple):
    """One question. answer: the index of the right choice, or the text that is to follow."""

    text: str
    answer: int | str
    choices: Sequence[str] = ()


class Task(NamedTuple):
    """One task. form: lm_eval's output_type."""

    name: str
    form: str  # multiple_choice | loglikelihood | loglikelihood_rolling | generate_until
    documents: Sequence[Document]


def _sums() -> list[Document]:
    """Return sums of two numbers, each with four results to choose from."""
    documents = []
    for number in range(8):
        left, right = 3 + number, 4 + number * 5 % 7
        results = [left + right + change for change in (0, 1, -2, 10)]
        turned = results[number % 4 :] + results[: number % 4]
        documents.append(
            Document(f"{left} + {right} =", turned.index(left + right), [f" {result}" for result in turned])
        )
    return documents


def _capitals() -> list[Document]:
    names, documents = list(_CITIES.values()), []
    for index, country in enumerate(_CITIES):
        choices = [f" {names[(index + step) % len(names)]}" for step in range(3)]
        documents.append(Document(f"The capital of {country} is", 0, choices))
    return documents


def _copies() -> list[Document]:
    """Return lines that are repeated, and then begun: the rest of the line is the answer."""
    documents = []
    for line in _LINES:
        first, rest = line.split(" ", 1)
        documents.append(Document(f"{line}\n{line}\n{first}", f" {rest}"))
    return documents


TASKS = (
    Task("sums", "multiple_choice", _sums()),
    Task("capitals", "multiple_choice", _capitals()),
    Task("last_word", "loglikelihood", [Document(text, f" {word}") for text, word in _SENTENCES]),
    Task("texts", "loglikelihood_rolling", [Document("", text) for text in _TEXTS]),
    Task("copies", "generate_until", _copies()),
)
#: lm_eval's metric of each form.
METRICS = {
    "multiple_choice": "acc",
    "loglikelihood": "acc",
    "loglikelihood_rolling": "word_perplexity",
    "generate_until": "exact_match",
}


def write_tasks(folder: Path) -> list[Path]:
    """Write the tasks into a folder as lm_eval reads them, a YAML file and a data file each; return the YAML files.

    They are the groups of `lm_eval --include_path FOLDER --tasks engine_core_sums,...`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in TASKS:
        data = folder.resolve() / f"{task.name}.jsonl"
        data.write_text("".join(json.dumps(_row(document)) + "\n" for document in task.documents))
        path = folder / f"{task.name}.yaml"
        path.write_text(json.dumps(_form(task, data), indent=1) + "\n")  # JSON is YAML
        written.append(path)
    return written


def _row(document: Document) -> dict[str, Any]:
    return {"text": document.text, "answer": document.answer, "choices": document.choices}


def _form(task: Task, data: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "task": f"engine_core_{task.name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": task.form,
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": METRICS[task.form]}],
    }
    if task.form == "multiple_choice":
        settings["doc_to_choice"] = "{{choices}}"
    if task.form == "loglikelihood_rolling":
        settings["doc_to_text"] = ""
    if task.form == "generate_until":
        settings["generation_kwargs"] = {"until": [UNTIL], "max_gen_toks": MOST_NEW_TOKENS, "temperature": 0.0}
    return settings
