"""Answers that must have a form: JSON by a schema, and one of some texts. Needs the extra [structured]."""

import json

from engine_core import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    """Print a person as JSON, and a mood."""
    person = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    mood = StructuredOutputsParams(choice=["positive", "negative"])
    with LLM(max_model_len=2048) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=person)
        question = {"role": "user", "content": "Alice is 30 years old. Write that as JSON."}
        print(json.loads(llm.chat([question], params, use_tqdm=False)[0].outputs[0].text))
        params = SamplingParams(temperature=0, structured_outputs=mood)
        print(llm.generate("The sentiment of 'I love it' is ", params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
