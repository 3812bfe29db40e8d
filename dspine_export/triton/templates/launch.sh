#!/usr/bin/env bash
# Starts tritonserver on this repository. Arguments are passed on to it.
#
#   TRITON_HOME     where the server is installed                     (/opt/tritonserver)
#   PYTHON          the interpreter that dspine_export is installed in (python3); its folder comes first on PATH, which is
#                   how the server's Python processes find their packages: they take no PYTHONPATH
#   DSPINE_MODELS   models to load, separated by spaces                ($served)
#
# All models here: $models
set -euo pipefail
cd "$$(dirname "$${BASH_SOURCE[0]}")"

TRITON_HOME=$${TRITON_HOME:-/opt/tritonserver}
PYTHON=$$(command -v "$${PYTHON:-python3}")
export PATH="$$(dirname "$$PYTHON"):$$PATH"
# Waiting threads must leave the cores alone: libgomp's default spins for milliseconds.
export GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-20000}

server=$$TRITON_HOME/bin/tritonserver
[ -x "$$server" ] || { echo "launch.sh: no $$server; set TRITON_HOME" >&2; exit 4; }
"$$PYTHON" -c 'import dspine_export' || { echo "launch.sh: $$PYTHON has no dspine_export: pip install it there, or set PYTHON" >&2; exit 4; }

# The server takes one backend directory: its own backends and ours, side by side.
backends=$$(mktemp -d)
for backend in "$$TRITON_HOME"/backends/* "$$PWD"/backends/*; do
    [ -d "$$backend" ] && ln -s "$$backend" "$$backends/"
done

# Explicit control: a model can be unloaded and loaded again, which is also how a dead backend process is replaced (probe.py --reload).
arguments=(--model-repository="$$PWD/model_repository" --backend-directory="$$backends" --model-control-mode=explicit)
for model in $${DSPINE_MODELS:-$served}; do
    arguments+=(--load-model="$$model")
done
$extra_arguments
"$$server" "$${arguments[@]}" "$$@" &
child=$$!
trap 'kill -TERM $$child 2>/dev/null || true' TERM INT
status=0
wait $$child || status=$$?
while kill -0 $$child 2>/dev/null; do # a signal ends `wait` before the server has ended
    status=0
    wait $$child || status=$$?
done
rm -rf "$$backends"
exit $$status
