#!/usr/bin/env bash
# Trains full-size models for a few steps on real text and prints how the loss fell: gpu_train.sh OCTET TEXT… (files or folders).
# GPT-2 124M and Llama 1B on one GPU; Llama 8B where there are two.
set -euo pipefail
octet=$(realpath "$1")
shift
texts=()
for text in "$@"; do texts+=("$(realpath "$text")"); done
cd "$(dirname "$0")/.."
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
"$octet" pack --quiet --separator % --output "$run/train.h5" --validation "$run/validation.h5" "${texts[@]}"
gpus=$(nvidia-smi -L | grep -c '^GPU')
table="model|GPUs|steps|first loss|last loss|validation|exit"
train() { # shape ranks steps sequence micro global lr settings…
  local name=$1 ranks=$2 steps=$3 out="$run/$1" code=0
  mpirun --allow-run-as-root --bind-to none -np "$ranks" "$octet" train "inputs/shapes/$name.cfg" --set "data.train=$run/train.h5" \
    --set "data.validation=$run/validation.h5" --set "run.directory=$out" --set "run.steps=$steps" --set log.every=1 \
    --set "batch.sequence=$4" --set "batch.micro=$5" --set "batch.global=$6" --set "optimizer.lr=$7" --set schedule.warmup=10 \
    --set checkpoint.at_end=false --set run.evaluate_samples=8 "${@:8}" >"$run/log" 2>&1 || code=$?
  [ "$code" -eq 0 ] || tail -n 5 "$run/log"
  local losses
  losses=$(sed -n 's/.*"loss":\([0-9.e+-]*\).*/\1/p' "$out/metrics.jsonl")
  table+=$'\n'"$name|$ranks|$steps|$(head -n 1 <<<"$losses")|$(tail -n 1 <<<"$losses")"
  table+="|$(sed -n 's/.*"validation_loss":\([0-9.e+-]*\).*/\1/p' "$out/metrics.jsonl" | tail -n 1)|$code"
}
train gpt2-124m 1 100 1024 32 32 6e-4
train llama-1b 1 40 4096 4 4 3e-4
if [ "$gpus" -ge 2 ]; then train llama-8b 2 40 4096 2 4 2e-4 --set parallel.zero=3; fi
echo "$table" | column -t -s '|' 2>/dev/null || echo "$table"
