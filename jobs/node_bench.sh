#!/usr/bin/env bash
# The first half of `make bench`: node_bench.sh OCTET [RESULTS.json]. Runs `octet bench` on a rank a GPU, or on two CPU ranks
# where there is none, with a deck that fits them.
set -euo pipefail
octet=$(realpath "$1")
results=$(realpath "${2:-bench.json}")
cd "$(dirname "$0")/.."
# shellcheck source=jobs/ranks.sh
. jobs/ranks.sh
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
if [ "$gpus" -eq 0 ]; then
  launch+=(-np 2)
  work=(inputs/shapes/tiny.cfg --set run.device=cpu --set precision.compute=fp32 --set batch.sequence=128)
else
  launch+=(-np "$gpus")
  work=(inputs/shapes/llama-1b.cfg --set model.tied=false --set batch.sequence=8192 --set batch.micro=2)
fi
"${launch[@]}" "$octet" bench "${work[@]}" --set "run.directory=$run" --json "$results"
