"""openai: files, batches, conversations, and responses that are stored and computed in the background."""

import io
import json
import os
import time

import openai

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
MODEL = os.environ["MODEL"]

lines = [
    {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 8},
    }
    for number in range(4)
]
data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
source = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
assert (source.bytes, source.status) == (len(data), "processed"), source
assert client.files.retrieve(source.id) == source
assert source.id in [file.id for file in client.files.list(purpose="batch")]
assert client.files.content(source.id).read() == data

batch = client.batches.create(
    input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "clients"}
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed", batch
assert batch.request_counts is not None
assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 0), batch
assert batch.output_file_id is not None
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert [answer["custom_id"] for answer in answers] == ["c0", "c1", "c2", "c3"]
assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers)
assert batch.id in [one.id for one in client.batches.list(limit=5)]
assert client.batches.cancel(batch.id).status == "completed"  # it has ended
assert client.files.delete(source.id).deleted

conversation = client.conversations.create(
    items=[{"type": "message", "role": "system", "content": "Be brief."}], metadata={"of": "clients"}
)
first = client.responses.create(model=MODEL, input="Hi", conversation=conversation.id, max_output_tokens=8)
assert first.conversation is not None
assert first.conversation.id == conversation.id
second = client.responses.create(
    model=MODEL, input="And?", conversation={"id": conversation.id}, max_output_tokens=8, truncation="auto"
)
items = list(client.conversations.items.list(conversation.id, order="asc"))
assert [item.type for item in items] == ["message"] * 5, items
item = client.conversations.items.retrieve(items[2].id, conversation_id=conversation.id)
assert item == items[2]
client.conversations.items.create(conversation.id, items=[{"type": "message", "role": "user", "content": "One more."}])
assert client.conversations.items.delete(item.id, conversation_id=conversation.id).id == conversation.id
assert client.conversations.update(conversation.id, metadata={"of": "others"}).metadata == {"of": "others"}
assert client.conversations.retrieve(conversation.id).metadata == {"of": "others"}
assert client.conversations.delete(conversation.id).deleted

begun = client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=8)
while begun.status in ("queued", "in_progress"):
    time.sleep(0.2)
    begun = client.responses.retrieve(begun.id)
assert begun.output_text
later = client.responses.create(model=MODEL, input="And?", previous_response_id=begun.id, max_output_tokens=8)
assert later.previous_response_id == begun.id
assert len(list(client.responses.input_items.list(later.id))) == 3
client.responses.delete(later.id)
print(answers[0]["response"]["body"]["choices"][0]["message"]["content"])
