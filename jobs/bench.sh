#!/usr/bin/env bash
# What `make bench` runs: bench.sh OCTET [WORK…]. Trains on random tokens and prints a table: the median step of those after the
# fifth, tokens/s and MFU a GPU, peak memory, and the rival's figures in the same run where RIVAL names a PyTorch script that
# takes SHAPE MICRO_BATCH SEQUENCE STEPS (shapes 1b, 3b, 8b). Works are those in `work_of` below; without any, three that fit.
# WORK+KEY=VALUE[+KEY=VALUE…] changes settings of a work, for comparisons: llama-8b+run.tune_matmul=true
set -euo pipefail
self=$(realpath "$0")
octet=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "${gpus:-0}" -eq 0 ] || "$octet" --version | grep -q 'without CUDA'; then
  echo "bench: no GPU that this build of octet can use"
  exit 0
fi
works=("$@")
if [ ${#works[@]} -eq 0 ]; then
  works=(gpt2-124m llama-1b)
  if [ "$gpus" -gt 1 ]; then works+=(llama-8b); fi
fi
steps=${STEPS:-20}
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
launch=(mpirun --bind-to none)
if [ "$(id -u)" -eq 0 ]; then launch+=(--allow-run-as-root); fi
median() { sort -g | awk '{ v[NR] = $1 } END { print NR ? v[int((NR + 1) / 2)] : "-" }'; }

# Runs a command and leaves in `peak` the most memory of any GPU meanwhile, as the driver sees it, in GiB.
watched() {
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 >"$run/memory" &
  local watcher=$! code=0
  "$@" || code=$?
  kill "$watcher"
  wait "$watcher" 2>/dev/null || true
  peak=$(sort -g "$run/memory" | tail -n 1 | awk '{ printf "%.1f", $1 / 1024 }')
  return "$code"
}

table="work|GPUs|micro|step ms|tok/s/gpu|MFU|planned GiB|driver GiB|rival tok/s/gpu|rival allocated GiB|rival driver GiB|ratio"
declare -A rivals # "shape micro sequence ranks": its row, run once

run_rival() { # shape micro sequence ranks
  local theirs memory
  watched torchrun --standalone --nproc_per_node "$4" "$RIVAL" "$1" "$2" "$3" "$steps" >"$run/rival.log" 2>"$run/rival.err" ||
    tail -n 5 "$run/rival.err"
  cat "$run/rival.log"
  theirs=$(sed -n 's|.* \([0-9]*\) tok/s/gpu.*|\1|p' "$run/rival.log")
  memory=$(sed -n 's|.*peak \([0-9.]*\) GiB.*|\1|p' "$run/rival.log")
  rivals["$*"]="${theirs:--}|${memory:--}|$peak"
}

bench() { # shape ranks sequence micro global vocabulary rival-shape settings…
  local shape=$1 ranks=$2 sequence=$3 micro=$4 global=$5 vocabulary=$6 rival=$7
  shift 7
  local tokens="$run/$vocabulary.h5" out="$run/$work" setting settings=()
  for setting in "$@" "${changes[@]}"; do settings+=(--set "$setting"); done
  [ -f "$tokens" ] || "$octet" pack --random 40000000 --vocabulary "$vocabulary" --output "$tokens"
  watched "${launch[@]}" -np "$ranks" "$octet" train "inputs/shapes/$shape.cfg" --set "data.train=$tokens" --set "run.directory=$out" \
    --set "run.steps=$steps" --set log.every=1 --set "batch.sequence=$sequence" --set "batch.micro=$micro" \
    --set "batch.global=$global" --set checkpoint.resume=none --set checkpoint.at_end=false --set schedule.kind=constant \
    --set optimizer.lr=1e-4 "${settings[@]}" >"$run/log" || { tail -n 5 "$run/log"; table+=$'\n'"$work|$ranks|$micro|failed"; return 0; }
  grep -E "grid|loss|$steps/$steps" "$run/log"
  local key='s/.*"KEY":\([0-9.e+-]*\).*/\1/p' step_ms rate mfu planned memory=$peak theirs="-|-|-" ratio=-
  step_ms=$(tail -n +6 "$out/metrics.jsonl" | sed -n "${key/KEY/step_ms}" | median)
  rate=$(awk -v t=$((global * sequence / ranks)) -v ms="$step_ms" 'BEGIN { printf "%.0f", t / ms * 1000 }')
  mfu=$(tail -n +6 "$out/metrics.jsonl" | sed -n "${key/KEY/mfu}" | median | awk '{ printf "%.1f%%", $1 * 100 }')
  planned=$(sed -n 's/ *planned in all *\([0-9.]*\) GiB.*/\1/p' "$run/log" | awk '{ printf "%.1f", $1 }')
  if [ -n "${RIVAL:-}" ] && [ "$rival" != - ]; then
    [ -n "${rivals["$rival $micro $sequence $ranks"]:-}" ] || run_rival "$rival" "$micro" "$sequence" "$ranks"
    theirs=${rivals["$rival $micro $sequence $ranks"]}
    ratio=$(awk -v a="$rate" -v b="${theirs%%|*}" 'BEGIN { print (b > 0 ? sprintf("%.3f", a / b) : "-") }')
  fi
  table+=$'\n'"$work|$ranks|$micro|$step_ms|$rate|$mfu|$planned|$memory|$theirs|$ratio"
}

# Optimizer state of 8 bytes a parameter in place of 12, without which 8B does not fit one GPU beside its gradients.
small_state=(optimizer.moments=bf16 optimizer.master=split)

work_of() {
  case $1 in
    gpt2-124m) bench gpt2-124m 1 1024 64 512 50257 - ;;
    gpt2-1558m) bench gpt2-1558m 1 1024 16 128 50257 - ;;
    gpt2-1558m-fp8) bench gpt2-1558m 1 1024 16 128 50257 - precision.fp8=current ;;
    llama-1b) bench llama-1b 1 8192 4 4 128256 1b model.tied=false ;;
    llama-1b-fp8) bench llama-1b 1 8192 4 4 128256 1b model.tied=false precision.fp8=current ;;
    llama-3b) bench llama-3b 1 8192 2 2 128256 3b model.tied=false ;;
    llama-3b-fp8) bench llama-3b 1 8192 2 2 128256 3b model.tied=false precision.fp8=current ;;
    qwen2.5-7b) bench qwen2-7b 1 1024 8 128 152064 - "${small_state[@]}" ;;
    qwen2.5-7b-fp8) bench qwen2-7b 1 1024 8 128 152064 - "${small_state[@]}" precision.fp8=current ;;
    llama-8b) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=3 memory.logits_mib=256 ;;
    llama-8b-fp8) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=3 memory.logits_mib=256 precision.fp8=current ;;
    llama-8b-one) bench llama-8b 1 8192 1 1 128256 - "${small_state[@]}" ;;
    llama-8b-two) bench llama-8b 2 8192 1 2 128256 - "${small_state[@]}" parallel.zero=1 ;;
    llama-8b-zero1) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=1 ;;
    llama-8b-zero2) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=2 ;;
    llama-8b-tensor2) bench llama-8b 2 8192 1 2 128256 8b parallel.tensor=2 parallel.sequence=true ;;
    llama-8b-pipeline2) bench llama-8b 2 8192 1 4 128256 8b parallel.pipeline=2 ;;
    llama-8b-interleaved2) bench llama-8b 2 8192 1 4 128256 8b parallel.pipeline=2 parallel.schedule=interleaved parallel.chunks=2 ;;
    llama-8b-zerobubble2) bench llama-8b 2 8192 1 4 128256 8b parallel.pipeline=2 parallel.schedule=zero_bubble ;;
    llama-8b-context2) bench llama-8b 2 8192 1 2 128256 8b parallel.context=2 parallel.zero=3 ;;
    llama-8b-32k) bench llama-8b 2 32768 1 1 128256 - parallel.context=2 parallel.zero=3 memory.recompute=block ;;
    llama-8b-128k) bench llama-8b 2 131072 1 1 128256 - parallel.context=2 parallel.zero=3 memory.recompute=block ;;
    *)
      echo "bench: unknown work $1; known: $(sed -n 's/^    \([a-z0-9.-]*\)) bench .*/\1/p' "$self" | xargs)" >&2
      exit 2
      ;;
  esac
}

for work in "${works[@]}"; do
  IFS=+ read -r -a changes <<<"$work"
  name=${changes[0]}
  changes=("${changes[@]:1}")
  work_of "$name"
done
echo
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | sed -n 1p
column -t -s '|' <<<"$table" 2>/dev/null || echo "$table"
