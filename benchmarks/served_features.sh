#!/usr/bin/env bash
# Training with a target in a vLLM server against `online`, a thread each, and `keep` against the disk: docs/guides/scaling.md.
#   benchmarks/served_features.sh DATA        DATA: the `data` folder of a smollm2-135m run, rows of 1,024 tokens
# Nothing else may run. Needs `make vllm-env smollm2-target`. Writes runs/served_*/drafter/training.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=$1
: "${VLLM_PYTHON:=.venv-vllm/bin/python}" "${PYTHON:=.venv/bin/python}" "${TURNS:=3}" "${STEPS:=10}" "${PORT:=8072}" "${FOLDER:=/dev/shm/served_features}"
cache=${DRAFTSMITH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/draftsmith}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 NO_COLOR=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=2 VLLM_LOGGING_LEVEL=WARNING
common=(
    target.model="$cache/smollm2" target.gguf_file=SmolLM2-135M-Instruct.Q4_1.gguf target.dtype=bfloat16
    data.max_length_tokens=1024 data.eval_rows_frac=0 train.logging_steps=1 train.save_strategy=no
)
served=(data.features.source=server "data.features.server.urls=['http://127.0.0.1:$PORT']" data.features.server.folder="$FOLDER")
begin() { rm -rf "runs/$1" && mkdir -p "runs/$1" && cp -r "$data" "runs/$1/data"; }
draftsmith() { "$PYTHON" -m draftsmith.cli.main "$1" smollm2-135m "${common[@]}" "${@:2}"; }
mkdir -p "$FOLDER"
begin served_target
command=$(draftsmith serve --features name=served_target "${served[@]}" 2> /dev/null | grep -m 1 '^python')
eval "$VLLM_PYTHON ${command#python } &" # its words are quoted for a shell
trap 'kill %1' EXIT
until curl -sf "http://127.0.0.1:$PORT/health"; do sleep 2 && kill -0 %1; done
for turn in $(seq "$TURNS"); do
    begin "served_online_$turn" && draftsmith train name="served_online_$turn" train.max_steps="$STEPS"
    begin "served_server_$turn" && draftsmith train name="served_server_$turn" train.max_steps="$STEPS" "${served[@]}"
done
begin served_keep && draftsmith train name=served_keep train.num_train_epochs=3 "${served[@]}" data.features.server.keep=true
begin served_disk && draftsmith features name=served_disk data.features.source=offline --yes
draftsmith train name=served_disk train.num_train_epochs=3 data.features.source=offline
