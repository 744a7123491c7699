#!/usr/bin/env bash
# Where drafting pays in vLLM and llama.cpp: the figures of docs/measured/engines.md, on a machine that does nothing else.
#   benchmarks/engines.sh QUESTIONS RUN=KIND...     as benchmarks/engines.sh question.jsonl smollm2-135m=parallel served=eagle
# QUESTIONS: Spec-Bench's question.jsonl. RUN: a run with a trained drafter; lookups are measured beside the first one.
# Needs `make vllm-env llamacpp-env smollm2-target`. NEW_TOKENS: of a turn. ROUNDS: questions for each request at a time.
# Writes runs/RUN/eval/vllm.json, runs/no-drafter/eval/llamacpp.json and runs/step_*.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
questions=$1
shift
: "${VLLM_PYTHON:=.venv-vllm/bin/python}" "${PYTHON:=.venv/bin/python}" "${THREADS:=2}" "${NEW_TOKENS:=96}" "${ROUNDS:=1}"
: "${CONCURRENCY:=1,4,16,64}" "${LLAMA_CONCURRENCY:=1,4}" "${OTHERS_CONCURRENCY:=1,4}"
cache=${DRAFTSMITH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/draftsmith}
export OMP_NUM_THREADS=$THREADS HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
set_recipe=(
    target.model="$cache/smollm2" target.gguf_file=SmolLM2-135M-Instruct.Q4_1.gguf target.dtype=bfloat16
    eval.questions="$questions" eval.limit_per_category=null eval.limit_per_task=11 eval.max_new_tokens="$NEW_TOKENS"
)
bench() { # PYTHON RUN KIND OPTIONS...
    local python=$1 run=$2 kind=$3
    shift 3
    echo "$(date +%T) $run $*"
    "$python" -m draftsmith.cli.main bench smollm2-135m name="$run" "${set_recipe[@]}" drafter.kind="$kind" \
        --questions-per-request "$ROUNDS" "$@"
}
bench "$VLLM_PYTHON" "${1%%=*}" "${1##*=}" --engine vllm --concurrency "$CONCURRENCY" --ngram
bench "$PYTHON" no-drafter parallel --engine llamacpp --concurrency "$LLAMA_CONCURRENCY" --ngram
target=$("$PYTHON" -c "import json, sys; print(json.load(open(sys.argv[1]))['target'])" "runs/${1%%=*}/export/vllm/export.json")
step() { PYTHONPATH=benchmarks:${PYTHONPATH:-} "$VLLM_PYTHON" benchmarks/vllm_step.py "$target" --new-tokens "$NEW_TOKENS" "$@"; }
echo "$(date +%T) steps"
step --json runs/step_plain.json
for each in "$@"; do
    run=${each%%=*}
    test -e "runs/$run/export/vllm" || "$PYTHON" -m draftsmith.cli.main export smollm2-135m name="$run" "${set_recipe[@]}" \
        drafter.kind="${each##*=}" --to vllm
    step --drafter "runs/$run/export/vllm" --json "runs/step_$run.json"
done
for each in "${@:2}"; do
    bench "$VLLM_PYTHON" "${each%%=*}" "${each##*=}" --engine vllm --concurrency "$OTHERS_CONCURRENCY"
done
date +%T
