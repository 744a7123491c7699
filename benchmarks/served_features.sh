#!/usr/bin/env bash
# Training with a target in a vLLM server against `online`, a thread each, and `keep` against the disk: docs/guides/scaling.md.
# The ratio of disk to online is the most that a server can reach, as from the disk no step waits for the target.
#   benchmarks/served_features.sh DATA        DATA: the `data` folder of a smollm2-135m run, rows of 1,024 tokens
# Nothing else may run. Needs `make vllm-env smollm2-target`. Writes runs/served_*/drafter/training.json, and of the turns
# runs/served_features.json: the median tokens/s of the last steps, and ratios: rows for the first 16 steps are asked for at
# the start, so that only later ones show whether the server keeps up. DTYPE: of the target. SET: further overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=$1
: "${VLLM_PYTHON:=.venv-vllm/bin/python}" "${PYTHON:=.venv/bin/python}" "${TURNS:=3}" "${STEPS:=30}" "${PORT:=8072}" "${FOLDER:=/dev/shm/served_features}" "${DTYPE:=bfloat16}" "${SET:=}"
cache=${DRAFTSMITH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/draftsmith}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 NO_COLOR=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=2 VLLM_LOGGING_LEVEL=WARNING
common=(
    target.model="$cache/smollm2" target.gguf_file=SmolLM2-135M-Instruct.Q4_1.gguf target.dtype="$DTYPE"
    data.max_length_tokens=1024 data.eval_rows_frac=0 train.logging_steps=1 train.save_strategy=no $SET
)
served=(data.features.source=server "data.features.server.urls=['http://127.0.0.1:$PORT']" data.features.server.folder="$FOLDER")
begin() { rm -rf "runs/$1" && mkdir -p "runs/$1" && cp -r "$data" "runs/$1/data"; }
draftsmith() { "$PYTHON" -m draftsmith.cli.main "$1" smollm2-135m "${common[@]}" "${@:2}"; }
mkdir -p "$FOLDER"
begin served_disk && draftsmith features name=served_disk data.features.source=offline
begin served_target
command=$(draftsmith serve --features name=served_target "${served[@]}" 2> /dev/null | grep -m 1 '^python')
# Its words are quoted for a shell. Without a cache of prefixes the server computes the rows anew in each turn.
eval "$VLLM_PYTHON ${command#python } --no-enable-prefix-caching &"
trap 'kill %1' EXIT
until curl -sf "http://127.0.0.1:$PORT/health"; do sleep 2 && kill -0 %1; done
for turn in $(seq "$TURNS"); do
    begin "served_online_$turn" && draftsmith train name="served_online_$turn" train.max_steps="$STEPS"
    begin "served_server_$turn" && draftsmith train name="served_server_$turn" train.max_steps="$STEPS" "${served[@]}"
    begin "served_disk_$turn" && cp -r runs/served_disk/features "runs/served_disk_$turn"
    draftsmith train name="served_disk_$turn" train.max_steps="$STEPS" data.features.source=offline
done
"$PYTHON" - "$TURNS" "$DTYPE" << 'END'
import json
import statistics
import sys
from pathlib import Path


def tokens_per_s(run: str) -> float:
    history = json.loads(Path(f"runs/{run}/drafter/training.json").read_text())["history"]
    return statistics.median([log["tokens_per_s"] for log in history if "tokens_per_s" in log][16:])


turns = range(1, int(sys.argv[1]) + 1)
rates = {source: [tokens_per_s(f"served_{source}_{turn}") for turn in turns] for source in ("online", "server", "disk")}
ratios = {
    f"{source}/online": [round(rate / online, 3) for rate, online in zip(rates[source], rates["online"])]
    for source in ("server", "disk")
}
figures = {"dtype": sys.argv[2], "tokens_per_s": rates, "ratios": ratios}
Path("runs/served_features.json").write_text(json.dumps(figures, indent=1) + "\n")
END
begin served_keep && draftsmith train name=served_keep train.num_train_epochs=3 "${served[@]}" data.features.server.keep=true
draftsmith train name=served_disk train.num_train_epochs=3 data.features.source=offline
