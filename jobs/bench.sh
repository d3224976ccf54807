#!/usr/bin/env bash
# What `make bench` runs: bench.sh OCTET [WORK…]. Trains on random tokens and prints a table: the median step of those after the
# fifth, tokens/s and MFU a GPU, peak memory, and the rival's figures in the same run where RIVAL names a PyTorch script that
# takes SHAPE MICRO_BATCH SEQUENCE STEPS (shapes 1b, 3b, 8b). Works: gpt2-124m llama-1b llama-3b llama-8b; all that fit unless given.
set -euo pipefail
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
bench() { # name ranks sequence micro global vocabulary rival-shape settings…
  local name=$1 ranks=$2 sequence=$3 micro=$4 global=$5 vocabulary=$6 rival=$7
  shift 7
  local tokens="$run/$vocabulary.h5" out="$run/$work"
  [ -f "$tokens" ] || "$octet" pack --random 40000000 --vocabulary "$vocabulary" --output "$tokens"
  watched "${launch[@]}" -np "$ranks" "$octet" train "inputs/shapes/$name.cfg" --set "data.train=$tokens" --set "run.directory=$out" \
    --set "run.steps=$steps" --set log.every=1 --set "batch.sequence=$sequence" --set "batch.micro=$micro" \
    --set "batch.global=$global" --set checkpoint.resume=none --set checkpoint.at_end=false --set schedule.kind=constant \
    --set optimizer.lr=1e-4 "$@" >"$run/log" || { tail -n 5 "$run/log"; table+=$'\n'"$work|$ranks|$micro|failed"; return 0; }
  grep -E "grid|loss|$steps/$steps" "$run/log"
  local key='s/.*"KEY":\([0-9.e+-]*\).*/\1/p' step_ms rate mfu planned memory=$peak theirs=- their_memory=- their_peak=- ratio=-
  step_ms=$(tail -n +6 "$out/metrics.jsonl" | sed -n "${key/KEY/step_ms}" | median)
  rate=$(awk -v t=$((global * sequence / ranks)) -v ms="$step_ms" 'BEGIN { printf "%.0f", t / ms * 1000 }')
  mfu=$(tail -n +6 "$out/metrics.jsonl" | sed -n "${key/KEY/mfu}" | median | awk '{ printf "%.1f%%", $1 * 100 }')
  planned=$(sed -n 's/ *planned in all *\([0-9.]*\) GiB.*/\1/p' "$run/log" | awk '{ printf "%.1f", $1 }')
  if [ -n "${RIVAL:-}" ] && [ "$rival" != - ]; then
    watched torchrun --standalone --nproc_per_node "$ranks" "$RIVAL" "$rival" "$micro" "$sequence" "$steps" >"$run/rival.log" \
      2>"$run/rival.err" || tail -n 5 "$run/rival.err"
    cat "$run/rival.log"
    their_peak=$peak
    theirs=$(sed -n 's|.* \([0-9]*\) tok/s/gpu.*|\1|p' "$run/rival.log")
    their_memory=$(sed -n 's|.*peak \([0-9.]*\) GiB.*|\1|p' "$run/rival.log")
    ratio=$(awk -v a="$rate" -v b="${theirs:-0}" 'BEGIN { print (b > 0 ? sprintf("%.3f", a / b) : "-") }')
  fi
  table+=$'\n'"$work|$ranks|$micro|$step_ms|$rate|$mfu|$planned|$memory|${theirs:--}|${their_memory:--}|$their_peak|$ratio"
}

for work in "${works[@]}"; do
  case $work in
    gpt2-124m) bench gpt2-124m 1 1024 64 512 50257 - ;;
    llama-1b) bench llama-1b 1 8192 4 4 128256 1b --set model.tied=false ;;
    llama-3b) bench llama-3b 1 8192 2 2 128256 3b --set model.tied=false ;;
    llama-8b) bench llama-8b 2 8192 1 2 128256 8b --set parallel.zero=3 --set memory.logits_mib=256 ;;
    llama-8b-zero1) bench llama-8b 2 8192 1 2 128256 - --set parallel.zero=1 ;;
    llama-8b-tensor2) bench llama-8b 2 8192 1 2 128256 - --set parallel.tensor=2 --set parallel.sequence=true ;;
    llama-8b-pipeline2) bench llama-8b 2 8192 1 4 128256 - --set parallel.pipeline=2 ;;
    llama-8b-interleaved2) bench llama-8b 2 8192 1 4 128256 - --set parallel.pipeline=2 --set parallel.schedule=interleaved --set parallel.chunks=2 ;;
    llama-8b-zerobubble2) bench llama-8b 2 8192 1 4 128256 - --set parallel.pipeline=2 --set parallel.schedule=zero_bubble ;;
    llama-8b-context2) bench llama-8b 2 8192 1 2 128256 - --set parallel.context=2 --set parallel.zero=3 ;;
    llama-8b-zero2) bench llama-8b 2 8192 1 2 128256 - --set parallel.zero=2 ;;
    *) echo "bench: unknown work $work; known: gpt2-124m llama-1b llama-3b llama-8b llama-8b-{zero1,zero2,tensor2,pipeline2,interleaved2,zerobubble2,context2}" >&2; exit 2 ;;
  esac
done
echo
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | sed -n 1p
column -t -s '|' <<<"$table" 2>/dev/null || echo "$table"
