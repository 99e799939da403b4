#!/usr/bin/env bash
# prometheus_client renames samples for one kind of scraper.
#
# A metric's name may contain colons, and vLLM's names do. Since 0.23 prometheus_client writes them as `_` in sample
# lines if the scraper accepts `application/openmetrics-text;version=1.0.0` without `escaping=`; the TYPE line keeps the
# colon. The text format 0.0.4 keeps both. 0.22.1 does not rename.
#
# What follows: `/metrics` must not negotiate the format with prometheus_client's WSGI application.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" prometheus_client==0.26.0
cat > "$folder/program.py" <<'PROGRAM'
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

registry = CollectorRegistry()
Gauge("vllm:num_requests_running", "requests", registry=registry).set(1)
for name, accept in (("plain", "text/plain;version=0.0.4"), ("open", "application/openmetrics-text;version=1.0.0")):
    text = choose_encoder(accept)[0](registry).decode()
    print(f"{name}:", next(line for line in text.splitlines() if line.startswith("vllm")))
    print(f"{name} type:", next(line for line in text.splitlines() if line.startswith("# TYPE")))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
plain: vllm:num_requests_running 1.0
plain type: # TYPE vllm:num_requests_running gauge
open: vllm_num_requests_running 1.0
open type: # TYPE vllm:num_requests_running gauge
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" PYTHONWARNINGS=ignore python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
