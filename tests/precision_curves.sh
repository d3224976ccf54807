#!/usr/bin/env bash
# Trains the same small Llama on real text in bf16 and with every recipe of precision.fp8, and compares the loss curves:
# precision_curves.sh OCTET TEXT…. Means of 20 steps may differ by 1 %. STEPS (500), RANKS (1) and SETTINGS ("--set …")
# change the run. On a GPU where there is one; on a CPU 500 steps take some two minutes a recipe.
set -euo pipefail
octet=$(realpath "$1")
shift
texts=()
for text in "$@"; do texts+=("$(realpath "$text")"); done
cd "$(dirname "$0")/.."
steps=${STEPS:-500}
read -r -a settings <<<"${SETTINGS:-}"
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
launch=(mpirun -np "${RANKS:-1}" --oversubscribe --bind-to none)
if [ "$(id -u)" -eq 0 ]; then launch+=(--allow-run-as-root); fi

"$octet" pack --separator % --output "$run/train.h5" --quiet "${texts[@]}"
for recipe in none current delayed block; do
  "${launch[@]}" "$octet" train inputs/shapes/tiny.cfg --set model.mlp=384 --set "data.train=$run/train.h5" \
    --set "run.directory=$run/$recipe" --set "run.steps=$steps" --set log.every=1 --set batch.sequence=128 --set batch.micro=16 \
    --set batch.global=16 --set optimizer.lr=1e-3 --set schedule.warmup=20 --set checkpoint.at_end=false \
    --set precision.compute=bf16 --set "precision.fp8=$recipe" "${settings[@]}" >"$run/$recipe.log" ||
    { tail -n 5 "$run/$recipe.log"; exit 1; }
  sed -n 's/.*"loss":\([0-9.eE+-]*\).*/\1/p' "$run/$recipe/metrics.jsonl" |
    awk '{ sum += $1; if (++n == 20) { print sum / n; sum = n = 0 } }' >"$run/$recipe.curve"
done
failed=0
for recipe in current delayed block; do
  paste "$run/none.curve" "$run/$recipe.curve" | awk -v recipe="$recipe" '
    { d = ($2 - $1) / $1; if (d < 0) d = -d; if (d > worst) { worst = d; at = NR * 20 } first = NR == 1 ? $1 : first; last = $1; theirs = $2 }
    END { printf "fp8 %-8s bf16 loss %.4f -> %.4f, fp8 ends at %.4f, worst difference of 20-step means %.3f%% (step %d)\n",
                 recipe, first, last, theirs, 100 * worst, at
          exit !(NR > 0 && worst < 0.01 && last < 0.8 * first) }' || failed=1
done
exit "$failed"
