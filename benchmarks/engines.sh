#!/usr/bin/env bash
# Where drafting pays in vLLM and llama.cpp: the figures of docs/measured/engines.md, on a machine that does nothing else.
#   benchmarks/engines.sh QUESTIONS RUN=KIND...     as benchmarks/engines.sh question.jsonl smollm2-135m=parallel served=eagle
# QUESTIONS: Spec-Bench's question.jsonl. RUN: a run with a trained drafter; lookups are measured beside the first one.
# TARGET: smollm2-135m or qwen2.5-coder-0.5b. DTYPE: of the target. NEW_TOKENS: of a turn. ROUNDS: questions for each
# request at a time. Needs `make vllm-env llamacpp-env` and `make smollm2-target` or `make qwen`.
# Writes runs/RUN/eval/vllm.json and llamacpp.json, runs/no-drafter-TARGET/eval/llamacpp.json and runs/step_*.json.
# What fails is named and left out; the exit status is then 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
questions=$1
shift
: "${VLLM_PYTHON:=.venv-vllm/bin/python}" "${PYTHON:=.venv/bin/python}" "${THREADS:=2}" "${NEW_TOKENS:=96}" "${ROUNDS:=1}"
: "${CONCURRENCY:=1,4,16,64}" "${LLAMA_CONCURRENCY:=1,4}" "${OTHERS_CONCURRENCY:=1,4,16,64}"
: "${TARGET:=smollm2-135m}" "${DTYPE:=bfloat16}"
case $TARGET in
    smollm2-135m) folder=smollm2 file=SmolLM2-135M-Instruct.Q4_1.gguf ;;
    qwen2.5-coder-0.5b) folder=$TARGET file=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf ;;
    *) echo "TARGET=$TARGET: set it to smollm2-135m or qwen2.5-coder-0.5b" >&2 && exit 2 ;;
esac
cache=${DRAFTSMITH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/draftsmith}
export OMP_NUM_THREADS=$THREADS HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
set_recipe=(
    target.model="$cache/$folder" target.gguf_file="$file" target.dtype="$DTYPE"
    eval.questions="$questions" eval.limit_per_category=null eval.limit_per_task=11 eval.max_new_tokens="$NEW_TOKENS"
)
failed=0
attempt() { # COMMAND...
    "$@" || { echo "FAILED: $*" >&2 && failed=1; }
}
bench() { # PYTHON RUN KIND OPTIONS...
    local python=$1 run=$2 kind=$3
    shift 3
    echo "$(date +%T) $run $*"
    "$python" -m draftsmith.cli.main bench "$TARGET" name="$run" "${set_recipe[@]}" drafter.kind="$kind" \
        --questions-per-request "$ROUNDS" "$@"
}
export_run() { # RUN KIND
    test -e "runs/$1/export/vllm" || "$PYTHON" -m draftsmith.cli.main export "$TARGET" name="$1" "${set_recipe[@]}" \
        drafter.kind="$2" --to vllm
}
step() { # TARGET_FOLDER OPTIONS...
    PYTHONPATH=benchmarks:${PYTHONPATH:-} "$VLLM_PYTHON" benchmarks/vllm_step.py "$1" --dtype "$DTYPE" \
        --new-tokens "$NEW_TOKENS" "${@:2}"
}
# vLLM 0.32 runs DFlash 2 and DSpark in its newer runner alone, whose kernels are Triton's: a CPU has none.
served=()
for each in "$@"; do
    case ${each##*=} in dflash2 | dspark) echo "$each: not in vLLM, which needs Triton for it" ;; *) served+=("$each") ;; esac
done
for each in "${served[@]:0:1}"; do
    attempt bench "$VLLM_PYTHON" "${each%%=*}" "${each##*=}" --engine vllm --concurrency "$CONCURRENCY" --ngram
done
attempt bench "$PYTHON" "no-drafter-$TARGET" parallel --engine llamacpp --concurrency "$LLAMA_CONCURRENCY" --ngram
target=
for each in "${served[@]}"; do
    run=${each%%=*}
    attempt export_run "$run" "${each##*=}"
    test -e "runs/$run/export/vllm/export.json" || continue
    if test -z "$target"; then
        target=$("$PYTHON" -c "import json, sys; print(json.load(open(sys.argv[1]))['target'])" "runs/$run/export/vllm/export.json")
        echo "$(date +%T) steps"
        attempt step "$target" --json "runs/step_plain_$TARGET.json"
    fi
    attempt step "$target" --drafter "runs/$run/export/vllm" --json "runs/step_$run.json"
done
for each in "${served[@]:1}"; do
    attempt bench "$VLLM_PYTHON" "${each%%=*}" "${each##*=}" --engine vllm --concurrency "$OTHERS_CONCURRENCY"
done
for each in "$@"; do
    case ${each##*=} in
        eagle3 | dflash | dflash2 | dspark)
            attempt bench "$PYTHON" "${each%%=*}" "${each##*=}" --engine llamacpp --concurrency "$LLAMA_CONCURRENCY"
            ;;
    esac
done
date +%T
exit "$failed"
