#!/bin/bash
# Record a run, replay it, ask how it would have gone with other options, and write a copy without its content.
# (docs/replay.md explains what each line of the output means.)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

engine-core generate --capture "$folder/run.cap" --max-tokens 16 \
  "Why is the sky blue?" "Name three colours." "What is a prime number?" "Why do cats purr?"

echo "== the scheduler again, on the recorded tokens: every decision is compared"
engine-core replay "$folder/run.cap"
echo "== the model again: every token is compared"
engine-core replay "$folder/run.cap" --mode full
echo "== the same requests with one row in place of many"
engine-core replay "$folder/run.cap" --what-if max_num_seqs=1,4
echo "== a copy without prompts and answers, which decides the same"
engine-core replay redact "$folder/run.cap" "$folder/redacted.cap"
engine-core replay "$folder/redacted.cap"
