#!/usr/bin/env bash
# What `make bench` runs: bench.sh OCTET [WORK…]. Trains on random tokens and prints a table. works.sh beside it says what the
# works and columns are, and which variables it takes (RIVAL, STEPS, LIMIT, OUT). Without works, those that fit: GPT-2 124M, Llama 1B,
# and 8B where there are two GPUs.
set -euo pipefail
octet=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
# shellcheck source=jobs/ranks.sh
. jobs/ranks.sh
# shellcheck source=jobs/works.sh
. jobs/works.sh
if [ "$gpus" -eq 0 ] && [ -z "${OCTET_CPU:-}" ]; then
  echo "bench: no GPU that this build of octet can use"
  exit 0
fi
works=("$@")
if [ ${#works[@]} -eq 0 ]; then
  works=(gpt2-124m llama-1b)
  if [ "$gpus" -gt 1 ]; then works+=(llama-8b); fi
fi
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
for one in "${works[@]}"; do measure "$one" || true; done
echo
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader 2>/dev/null | sed -n 1p || true
column -t -s '|' <<<"$table" 2>/dev/null || echo "$table"
