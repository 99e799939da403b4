"""A streamed chat over HTTP with the standard library: `python http_client.py [URL]`.

Start a server first: `engine-core serve --http 127.0.0.1:8000`. OpenAI's own client works as well: base_url=URL/v1.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator


def stream(url: str, question: str) -> Iterator[str]:
    """Yield the pieces of an answer as they come. Errors: urllib.error.URLError."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:  # server-sent events: "data: {...}", then "data: [DONE]"
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    yield choice["delta"].get("content") or ""


def main() -> None:
    """Print the pieces of an answer as they come."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    for piece in stream(url, "Why is the sky blue?"):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
