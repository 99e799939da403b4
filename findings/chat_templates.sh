#!/usr/bin/env bash
# transformers saves named chat templates in a folder of their own.
#
# A tokenizer with several templates (`default` and `tool_use`) used to keep them in tokenizer_config.json. transformers 5
# saves the default one as chat_template.jinja and the others as additional_chat_templates/NAME.jinja, and nothing in
# tokenizer_config.json. With `tools` its tokenizer then renders with `tool_use`.
#
# What follows: a reader or downloader that knows only the first file uses the wrong template for tools, silently.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
cat > "$folder/program.py" <<'PROGRAM'
import json
import os
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")))
tokenizer.chat_template = {"default": "default", "tool_use": "tool_use"}
tokenizer.save_pretrained("saved")
files = [os.path.join(folder, name) for folder, _, names in os.walk("saved") for name in names]
print("templates:", sorted(file.removeprefix("saved/") for file in files if file.endswith(".jinja")))
print("in tokenizer_config.json:", "chat_template" in json.load(open("saved/tokenizer_config.json")))
read = PreTrainedTokenizerFast.from_pretrained("saved")
chat = [{"role": "user", "content": "hello"}]
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
print("without tools:", read.apply_chat_template(chat, tokenize=False))
print("with tools:", read.apply_chat_template(chat, tools=[tool], tokenize=False))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
templates: ['additional_chat_templates/tool_use.jinja', 'chat_template.jinja']
in tokenizer_config.json: False
without tools: default
with tools: tool_use
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" PYTHONWARNINGS=ignore python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
