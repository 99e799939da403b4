#!/bin/bash
# Two engines behind a router. The router places a request where the beginning of its prompt is cached.
# (docs/scale_out.md has engines on several machines, keys, and what happens when one dies.)
set -eu
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT

for name in a b; do
  engine-core serve --listen "ipc://$folder/$name.sock" --max-model-len 2048 &
done
engine-core route --listen "ipc://$folder/router.sock" --replica "ipc://$folder/a.sock" "ipc://$folder/b.sock" &

for _ in $(seq 120); do  # until the router has found both engines
  engine-core control replicas --connect "ipc://$folder/router.sock" >"$folder/replicas" 2>/dev/null || true
  [ "$(grep -c ' open ' "$folder/replicas")" = 2 ] && break
  sleep 0.5
done
cat "$folder/replicas"
engine-core generate --connect "ipc://$folder/router.sock" --max-tokens 16 "Why is the sky blue?" "Name three colours."
