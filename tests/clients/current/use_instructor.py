"""instructor: a pydantic model as the answer, by JSON schema."""

import os
from typing import Literal

import instructor
import openai
import pydantic


class Colour(pydantic.BaseModel):
    """The answer that the model is held to."""

    name: Literal["red", "green", "blue"]
    warmth: int = pydantic.Field(ge=0, le=9)


raw = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
found = client.chat.completions.create(
    model=os.environ["MODEL"],
    messages=[{"role": "user", "content": "Describe the colour of the sky."}],
    response_model=Colour,
    max_tokens=200,
    temperature=0,
    max_retries=0,
)
assert 0 <= found.warmth <= 9
