#!/usr/bin/env bash
# What `make run` runs: demo.sh OCTET [TEXT…]. Packs text, trains a tiny Llama, stops half-way, goes on from the
# checkpoint, and compares the validation loss with the unigram entropy of the text. Starts afresh in runs/demo.
set -euo pipefail
octet=$(realpath "$1")
shift
texts=()
for text in "$@"; do texts+=("$(realpath "$text")"); done
cd "$(dirname "$0")/.."
run=runs/demo

# Fortunes end with a line of %; a text of one's own is one document a file.
separator=()
if [ ${#texts[@]} -eq 0 ]; then
  texts=(/usr/share/games/fortunes)
  separator=(--separator %)
fi

rm -rf "$run"
mkdir -p "$run"
# Links and the index files of fortunes are left out by pack, which also prints the entropy of single bytes: what a
# model that ignores their order could reach.
"$octet" pack "${separator[@]}" --output "$run/train.h5" --validation "$run/validation.h5" --quiet "${texts[@]}" |
  tee "$run/pack.log"
entropy=$(sed -n "s|^$run/validation.h5: .* \([0-9.]*\) nats/token.*|\1|p" "$run/pack.log")

# shellcheck source=jobs/ranks.sh
. jobs/ranks.sh
ranks=8 steps=300 settings=()
if [ "$gpus" -gt 0 ]; then
  ranks=1 steps=1000
  while [ $((ranks * 2)) -le "$gpus" ] && [ "$ranks" -lt 8 ]; do ranks=$((ranks * 2)); done
  settings=(--set "parallel.data=$ranks" --set parallel.tensor=1 --set parallel.sequence=false
    --set precision.compute=bf16)
fi

launch+=(-np "$ranks")
train=("$octet" train inputs/shapes/tiny.cfg inputs/demo.cfg --set "data.train=$run/train.h5"
  --set "data.validation=$run/validation.h5" --set "run.directory=$run" --set "run.steps=$steps" "${settings[@]}")

half=$((steps / 2))
printf '\n== trains on %s ranks and stops after step %s\n' "$ranks" "$half"
code=0
"${launch[@]}" -q "${train[@]}" --set "run.stop_after=$half" || code=$?
if [ "$code" -ne 85 ]; then
  echo "expected exit code 85 (stopped on request), got $code" >&2
  exit $((code == 0 ? 1 : code))
fi
printf '\n== goes on from the checkpoint of step %s\n' "$half"
"${launch[@]}" "${train[@]}"

loss=$(sed -n 's/.*"validation_loss": *\([0-9.e+-]*\).*/\1/p' "$run/metrics.jsonl" | tail -n 1)
printf '\nrun folder        %s\nmetrics           %s\ncheckpoints       %s\n' "$run" "$run/metrics.jsonl" "$run/checkpoints"
printf 'unigram entropy   %.4f nats/token\nvalidation loss   %.4f nats/token\n' "$entropy" "$loss"
awk -v loss="$loss" -v entropy="$entropy" 'BEGIN { exit !(loss > 0 && loss < 0.75 * entropy) }' || {
  echo "the validation loss should be below three quarters of the unigram entropy" >&2
  exit 1
}
