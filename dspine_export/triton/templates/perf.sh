#!/usr/bin/env bash
# Throughput, time to first token and inter-token latency of the running server at several concurrencies, by NVIDIA's aiperf.
# (dspine-export's tools/serve_load.py also measures acceptance, and compares with speculation switched off.)
#
#   URL (http://127.0.0.1:8000)  CONCURRENCY ("1 4 16 64")  INPUT_TOKENS (128)  OUTPUT_TOKENS (128)
set -euo pipefail
cd "$$(dirname "$${BASH_SOURCE[0]}")"
command -v aiperf >/dev/null || { echo 'perf.sh: no aiperf on PATH (pip install aiperf)' >&2; exit 4; }

for concurrency in $${CONCURRENCY:-1 4 16 64}; do
    aiperf profile --model $model --tokenizer $tokenizer --endpoint-type template --streaming \
        --url "$${URL:-http://127.0.0.1:8000}/v2/models/$model/generate_stream" \
        --extra-inputs 'payload_template:{"text_input": {{ text|tojson }}, "stream": true, "ignore_eos": true, "max_tokens": {{ max_tokens }}}' \
        --extra-inputs response_field:text_output \
        --concurrency "$$concurrency" --request-count "$$((concurrency * 4 > 16 ? concurrency * 4 : 16))" \
        --synthetic-input-tokens-mean "$${INPUT_TOKENS:-128}" --output-tokens-mean "$${OUTPUT_TOKENS:-128}" "$$@"
done
