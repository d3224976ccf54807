#!/usr/bin/env bash
# What `make bench` runs: bench.sh OCTET. Trains published shapes for a few steps on 1, 2, 4 and 8 of the GPUs that
# there are, on random bytes, and prints octet's own log lines (tokens/s, TFLOP/s, MFU).
set -euo pipefail
octet=$(realpath "$1")
cd "$(dirname "$0")/.."
gpus=0
if ! "$octet" --version | grep -q 'without CUDA' && command -v nvidia-smi >/dev/null; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi
if [ "$gpus" -eq 0 ]; then
  echo "bench: no GPU that this build of octet can use"
  exit 0
fi

run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
head -c 32000000 /dev/urandom | od -An -v -tx1 -w32 >"$run/text.txt"
"$octet" pack --quiet --output "$run/tokens.h5" "$run/text.txt"

launch=(mpirun --bind-to none)
if [ "$(id -u)" -eq 0 ]; then launch+=(--allow-run-as-root); fi
bench() { # shape ranks sequence micro
  local global=$((2 * $2 * $4))
  printf '\n== %s, %s GPUs, sequence %s, micro-batch %s\n' "$1" "$2" "$3" "$4"
  "${launch[@]}" -np "$2" "$octet" train "inputs/shapes/$1.cfg" --set "data.train=$run/tokens.h5" \
    --set "run.directory=$run/$1-$2" --set run.steps=20 --set log.every=5 --set "batch.sequence=$3" \
    --set "batch.micro=$4" --set "batch.global=$global" --set checkpoint.resume=none
  rm -rf "${run:?}/$1-$2"
}
for ranks in 1 2 4 8; do
  if [ "$ranks" -gt "$gpus" ]; then break; fi
  bench gpt2-124m "$ranks" 1024 32
  bench llama-1b "$ranks" 4096 2
done
