# shellcheck shell=bash
# Sourced by bench.sh and node.sh, behind ranks.sh: training runs that are measured. Needs `run`, a
# folder of its own. `measure WORK` adds a row of these columns to `table`: the median step of those after the fifth,
# tokens/s and MFU a GPU, the plan and the most memory that the driver saw, and the rival where RIVAL names one.
# A work is one of `work_of`; WORK@RANKS takes more or fewer ranks, the batch growing with them;
# WORK+KEY=VALUE[+KEY=VALUE…] changes settings, for comparisons: llama-8b@8+run.tune_matmul=true
# Variables: STEPS a run (20), LIMIT of seconds a run (none), RIVAL (a PyTorch script: SHAPE MICRO_BATCH SEQUENCE STEPS), OUT, a
# folder for the logs of all runs (runs.log).
# OCTET_CPU=1 trains a tiny model on CPU ranks in every work's layout, which tries scripts and says nothing of speed.
: "${octet:?}" "${gpus:?}" "${device:?}" "${launch[*]:?}"
works_file=${BASH_SOURCE[0]}
table="work|GPUs|micro|step ms|tok/s/gpu|MFU|planned GiB|driver GiB|rival tok/s/gpu|rival allocated GiB|rival driver GiB|ratio"
declare -A rivals # "shape micro sequence ranks": its row, run once

median() { sort -g | awk '{ v[NR] = $1 } END { print NR ? (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 : "-" }'; }

# Runs a command for at most LIMIT seconds, and not past the script's `budget` where it has one.
limited() {
  local limit=${LIMIT:-0} rest
  if [ -n "${budget:-}" ]; then
    rest=$((budget - SECONDS))
    limit=$((rest < 1 ? 1 : rest < limit ? rest : limit))
  fi
  timeout --foreground --kill-after=10 "$limit" "$@"
}

# Runs a command and leaves in `peak` the most memory of any GPU meanwhile, as the driver sees it, in GiB.
watched() {
  local watcher code=0
  peak=-
  : "${run:?}"
  if [ "$gpus" -eq 0 ]; then
    limited "$@"
    return
  fi
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 >"$run/memory" &
  watcher=$!
  limited "$@" || code=$?
  kill "$watcher"
  wait "$watcher" 2>/dev/null || true
  peak=$(sort -g "$run/memory" | tail -n 1 | awk '{ printf "%.1f", $1 / 1024 }')
  return "$code"
}

# Adds a log to the one file of all logs, where OUT is set.
keep_log() { # name log
  if [ -n "${OUT:-}" ]; then
    printf '\n== %s\n' "$1" >>"$OUT/runs.log"
    cat "$2" >>"$OUT/runs.log"
  fi
}

# Why the run with this log and exit code failed, in one line.
reason() { # log code
  local error
  error=$(grep -aE 'error|Error' "$1" | grep -av '^Primary job' | head -n 1 | tr '|' '/' | cut -c 1-120)
  if [ "$2" -eq 124 ] || [ "$2" -eq 137 ]; then error="stopped after ${LIMIT:-0} s"; fi
  echo "failed, exit $2: ${error:-no message}"
}

run_rival() { # shape micro sequence ranks
  local theirs memory
  watched torchrun --standalone --nproc_per_node "$4" "$RIVAL" "$1" "$2" "$3" "${STEPS:-20}" >"$run/rival.log" 2>"$run/rival.err" ||
    tail -n 5 "$run/rival.err"
  cat "$run/rival.log"
  theirs=$(sed -n 's|.* \([0-9]*\) tok/s/gpu.*|\1|p' "$run/rival.log")
  memory=$(sed -n 's|.*peak \([0-9.]*\) GiB.*|\1|p' "$run/rival.log")
  rivals["$*"]="${theirs:--}|${memory:--}|$peak"
}

bench() { # shape ranks sequence micro global vocabulary rival-shape settings…
  local shape=$1 ranks=$2 sequence=$3 micro=$4 global=$5 vocabulary=$6 rival=$7 steps=${STEPS:-20}
  shift 7
  local out="$run/$work" log="$run/log" setting settings=() code=0 key micro_before=$micro
  if [ -n "$at" ] && [ "$at" -ne "$ranks" ]; then
    global=$((global * at / ranks))
    ranks=$at
  fi
  for setting in "${changes[@]}"; do
    case $setting in
      batch.micro=*)
        micro=${setting#*=}
        global=$((global * micro / micro_before))
        ;;
      batch.sequence=*) sequence=${setting#*=} ;;
    esac
  done
  for setting in "${changes[@]}"; do
    case $setting in batch.global=*) global=${setting#*=} ;; esac
  done
  for setting in "$@" "${changes[@]}"; do settings+=(--set "$setting"); done
  if [ -n "${OCTET_CPU:-}" ]; then
    shape=tiny vocabulary=257 sequence=$((sequence / 256)) global=$((global > 4 * ranks ? 4 * ranks : global))
    micro=$((micro * ranks > global ? 1 : micro))
    for setting in model.layers=8 model.hidden=64 model.heads=4 model.head_size=16 model.mlp=128; do
      settings+=(--set "$setting")
    done
    if [ "$sequence" -lt 16 ]; then sequence=16; fi
  fi
  local tokens="$run/$vocabulary.h5"
  [ -f "$tokens" ] || "$octet" pack --quiet --random 40000000 --vocabulary "$vocabulary" --output "$tokens"
  watched "${launch[@]}" -np "$ranks" "$octet" train "inputs/shapes/$shape.cfg" --set "data.train=$tokens" --set "run.directory=$out" \
    --set "run.steps=$steps" --set log.every=1 --set checkpoint.resume=none --set checkpoint.at_end=false --set schedule.kind=constant \
    --set optimizer.lr=1e-4 "${settings[@]}" --set "batch.sequence=$sequence" --set "batch.micro=$micro" \
    --set "batch.global=$global" --set "run.device=$device" >"$log" 2>&1 || code=$?
  keep_log "$work" "$log"
  grep -aE "grid|loss|$steps/$steps" "$log" || true
  if [ "$code" -ne 0 ]; then
    tail -n 8 "$log"
    table+=$'\n'"$work|$ranks|$micro|$(reason "$log" "$code")|-|-|-|-|-|-|-|-"
    return "$code"
  fi
  key='s/.*"KEY":\([0-9.e+-]*\).*/\1/p'
  local step_ms rate mfu planned memory=$peak theirs="-|-|-" ratio=-
  step_ms=$(tail -n +6 "$out/metrics.jsonl" | sed -n "${key/KEY/step_ms}" | median)
  rate=$(awk -v t=$((global * sequence / ranks)) -v ms="$step_ms" 'BEGIN { printf "%.0f", t / ms * 1000 }')
  mfu=$(tail -n +6 "$out/metrics.jsonl" | sed -n "${key/KEY/mfu}" | median | awk '/[0-9]/ { printf "%.1f%%", $1 * 100 }')
  planned=$(sed -n 's/ *planned in all *\([0-9.]*\) GiB.*/\1/p' "$log" | awk '{ printf "%.1f", $1 }')
  rm -rf "$out"
  if [ -n "${RIVAL:-}" ] && [ "$rival" != - ]; then
    [ -n "${rivals["$rival $micro $sequence $ranks"]:-}" ] || run_rival "$rival" "$micro" "$sequence" "$ranks"
    theirs=${rivals["$rival $micro $sequence $ranks"]}
    ratio=$(awk -v a="$rate" -v b="${theirs%%|*}" 'BEGIN { print (b > 0 ? sprintf("%.3f", a / b) : "-") }')
  fi
  table+=$'\n'"$work|$ranks|$micro|$step_ms|$rate|${mfu:--}|$planned|$memory|$theirs|$ratio"
}

# Optimizer state of 8 bytes a parameter in place of 12, without which 8B does not fit one GPU beside its gradients.
small_state=(optimizer.moments=bf16 optimizer.master=split)

# Works whose names end in a number of GPUs take that many; llama-8b-tensor and those below it take all.
work_of() { # name
  local n=$all
  # 70B on eight GPUs; on fewer, as many of its 80 layers as make the same shares: 10 a GPU. In GB (10^9 bytes) a GPU of 141 + 9:
  #   master remainder + bf16 copy 4, moments 4, gradients 4 bytes x 70.6e9 / 8             106
  #   ZeRO-3: two slots and one of embeddings in bf16, as many staging buffers in float32    16   over tensor ranks
  #   inputs of 80 layers x 8192 tokens x 8192 x 2 bytes (block recompute), one layer whole  13   over tensor ranks
  #   logits, NCCL, libraries                                                                 4
  # Tensor alone has no slots and no staging, and room for all activations: 100 / 8 instead of 13.
  local seventy=(model.layers=$((10 * n)) memory.logits_mib=256 "${small_state[@]}")
  case $1 in
    gpt2-124m) bench gpt2-124m 1 1024 64 512 50257 - memory.logits_mib=8192 ;;
    gpt2-1558m) bench gpt2-1558m 1 1024 16 128 50257 - memory.logits_mib=2048 ;;
    gpt2-1558m-fp8) bench gpt2-1558m 1 1024 16 128 50257 - memory.logits_mib=2048 precision.fp8=delayed ;;
    llama-1b) bench llama-1b 1 8192 4 4 128256 1b model.tied=false memory.logits_mib=8192 ;;
    llama-1b-fp8) bench llama-1b 1 8192 4 4 128256 1b model.tied=false memory.logits_mib=8192 precision.fp8=delayed ;;
    llama-3b) bench llama-3b 1 8192 2 2 128256 3b model.tied=false memory.logits_mib=4400 ;;
    llama-3b-fp8) bench llama-3b 1 8192 2 2 128256 3b model.tied=false memory.logits_mib=4400 precision.fp8=delayed ;;
    qwen2.5-7b) bench qwen2-7b 1 1024 16 128 152064 - "${small_state[@]}" memory.recompute=selective memory.logits_mib=2400 ;;
    qwen2.5-7b-fp8) bench qwen2-7b 1 1024 8 128 152064 - "${small_state[@]}" precision.fp8=delayed ;;
    llama-8b) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=3 memory.logits_mib=256 ;;
    llama-8b-fp8) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=2 memory.logits_mib=2048 parallel.overlap_optimizer=true precision.fp8=delayed precision.fp8_gather=true ;;
    llama-8b-one) bench llama-8b 1 8192 1 1 128256 - "${small_state[@]}" ;;
    llama-8b-two) bench llama-8b 2 8192 1 2 128256 - "${small_state[@]}" parallel.zero=1 ;;
    llama-8b-zero1) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=1 ;;
    llama-8b-zero2) bench llama-8b 2 8192 1 2 128256 8b parallel.zero=2 memory.logits_mib=2048 parallel.overlap_optimizer=true ;;
    llama-8b-tensor2) bench llama-8b 2 8192 1 2 128256 8b parallel.tensor=2 parallel.sequence=true memory.logits_mib=2048 ;;
    llama-8b-pipeline2) bench llama-8b 2 8192 1 4 128256 8b parallel.pipeline=2 ;;
    llama-8b-interleaved2) bench llama-8b 2 8192 1 4 128256 8b parallel.pipeline=2 parallel.schedule=interleaved parallel.chunks=2 ;;
    llama-8b-zerobubble2) bench llama-8b 2 8192 1 4 128256 8b parallel.pipeline=2 parallel.schedule=zero_bubble ;;
    llama-8b-context2) bench llama-8b 2 8192 1 2 128256 8b parallel.context=2 parallel.zero=3 ;;
    llama-8b-32k) bench llama-8b 2 32768 1 1 128256 - parallel.context=2 parallel.zero=3 memory.recompute=block ;;
    llama-8b-128k) bench llama-8b 2 131072 1 1 128256 - parallel.context=2 parallel.zero=3 memory.recompute=block ;;
    llama-8b-tensor) bench llama-8b "$n" 8192 1 "$n" 128256 - parallel.tensor="$n" parallel.sequence=true ;;
    llama-8b-pipeline) bench llama-8b "$n" 8192 1 $((4 * n)) 128256 - parallel.pipeline="$n" ;;
    llama-8b-interleaved) bench llama-8b "$n" 8192 1 $((4 * n)) 128256 - parallel.pipeline="$n" parallel.schedule=interleaved parallel.chunks=2 ;;
    llama-8b-zerobubble) bench llama-8b "$n" 8192 1 $((4 * n)) 128256 - parallel.pipeline="$n" parallel.schedule=zero_bubble ;;
    llama-8b-context) bench llama-8b "$n" $((16384 * n)) 1 1 128256 - parallel.context="$n" parallel.zero=3 ;;
    llama-8b-cube) bench llama-8b "$n" 8192 1 "$n" 128256 - parallel.tensor=2 parallel.sequence=true parallel.pipeline=2 ;;
    llama-70b-zero3) bench llama-70b "$n" 8192 1 "$n" 128256 - "${seventy[@]}" parallel.zero=3 memory.recompute=block ;;
    llama-70b-tensor2) bench llama-70b "$n" 8192 1 $((n / 2)) 128256 - "${seventy[@]}" parallel.tensor=2 parallel.sequence=true parallel.zero=3 memory.recompute=block ;;
    llama-70b-tensor) bench llama-70b "$n" 8192 1 1 128256 - "${seventy[@]}" parallel.tensor="$n" parallel.sequence=true ;;
    *)
      echo "$0: unknown work $1; known: $(sed -n 's/^    \([a-z0-9.-]*\)) bench .*/\1/p' "$works_file" | xargs)" >&2
      exit 2
      ;;
  esac
}

# Runs WORK[@RANKS][+KEY=VALUE…] and adds its row to `table`; fails where the run does.
measure() {
  work=$1
  local name
  IFS=+ read -r -a changes <<<"$work"
  name=${changes[0]}
  changes=("${changes[@]:1}")
  at=
  if [[ $name == *@* ]]; then at=${name#*@} name=${name%@*}; fi
  all=${at:-$gpus}
  work_of "$name"
}
