#!/usr/bin/env bash
# Measures and tests a node of 2, 4 or 8 GPUs, most valuable first: node.sh OCTET [PART|ROW…]. Sizes follow the number of GPUs.
# Every row has a time limit; a failed one is a row too, and exit code 1 at the end. Rows that BUDGET (570 s) has no time for are
# left, with the words for another call as the last line. If OUT is set: $OUT/node.md and node.json with the results so far, comm.json,
# and runs.log with all logs.
#   comm        octet bench comm on all GPUs, beside published bandwidths
#   8b          Llama 3 8B at 8192 tokens, bf16 and fp8, in the layouts that should be fastest
#   scaling     8B with ZeRO-1 on 1, 2, 4, 8 GPUs, a sample each
#   curves      a small model in layouts of every axis: its losses on text against one GPU's
#   layouts     8B with all GPUs on one axis, context with 16k tokens a GPU, and 2 x 2 (x 2)
#   gpt2        GPT-2 1558M
#   70b         Llama 3 70B, or as many of its layers as the GPUs have room for (works.sh says how that is planned)
#   checkpoint  8B, and 70B where the disk has room: saved, and loaded by a new start
#   kill        SIGKILL for one rank of a running job; the next start goes on
# Variables: TEXT (a folder or file for the curves), RIVAL and STEPS as in works.sh, CHANGES for all 8B rows (such as
# +run.tune_matmul=true). OCTET_CPU=1 does it all with a tiny model on CPU_RANKS (4) CPU ranks in two minutes, to try this script.
set -uo pipefail
export LC_ALL=C.UTF-8
octet=$(realpath "$1")
shift
cd "$(dirname "$0")/.." || exit
# shellcheck source=jobs/ranks.sh
. jobs/ranks.sh
# shellcheck source=jobs/works.sh
. jobs/works.sh
wanted=("$@") results=node again="jobs/node.sh $octet"
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
STEPS=${STEPS:-14} # the median of nine
CHANGES=${CHANGES:-}
n=$gpus
if [ -n "${OCTET_CPU:-}" ]; then
  n=${CPU_RANKS:-4} machine="a trial of the script on CPU ranks" STEPS=6
elif [ "$gpus" -lt 2 ]; then
  echo "node: $gpus GPUs that this build of octet can use; this script is for 2, 4 or 8 (OCTET_CPU=1 tries it without)"
  exit 0
else
  machine=$(nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | sed -n 1p)
fi
title="$n x $machine; $("$octet" --version | sed -n '1s/  */ /gp'); $(date -u +%FT%TZ)"
# shellcheck source=jobs/rows.sh
. jobs/rows.sh
all_ranks=("${launch[@]}" -np "$n" "$octet")

# What others published of a work, tokens/s a GPU, for the last column. Eight GPUs are H100s unless said; four are H200s.
published() { # work
  case "$gpus $1" in
    8*fp8*8b* | 8*8b*fp8*) echo "14,451 Megatron; 10,938 TorchTitan, H200" ;;
    8*llama-8b-context*) echo "1,071 TorchTitan at 128k" ;;
    "8 llama-8b"*) echo "10,682 Megatron" ;;
    "8 gpt2-1558m"*) echo "48,500 llm.c bf16" ;;
    "4 gpt2-1558m"*) echo "49,300 llm.c bf16" ;;
    "4 llama-8b"*) echo "10,340 PyTorch, micro-batch 2" ;;
    *) echo - ;;
  esac
}

losses() { sed -n 's/.*"step":\([0-9]*\),.*"loss":\([0-9.e+-]*\).*/\1 \2/p' "$1/metrics.jsonl"; }

# Of the steps that two files of losses have in common: how many, and the largest relative difference.
difference() {
  awk 'NR == FNR { loss[$1] = $2; next }
       $1 in loss { d = ($2 - loss[$1]) / loss[$1]; d = d < 0 ? -d : d; worst = d > worst ? d : worst; ++steps }
       END { printf "%d %.1e\n", steps, worst }' "$1" "$2"
}

below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'; }

run_comm() {
  local code=0 json=${OUT:-$run}/comm.json deck=(inputs/shapes/llama-8b.cfg --set batch.sequence=8192)
  if [ "$gpus" -eq 0 ]; then
    deck=(inputs/shapes/tiny.cfg --set precision.compute=fp32 --set batch.sequence=128 --max-bytes 1M --seconds 0.01)
  fi
  limited "${all_ranks[@]}" bench comm "${deck[@]}" --set "run.device=$device" --set "run.directory=$run/comm" --json "$json" >"$run/comm.log" 2>&1 || code=$?
  cat "$run/comm.log"
  keep_log comm "$run/comm.log"
  if [ "$code" -ne 0 ]; then
    check comm "$(reason "$run/comm.log" "$code")" - FAILED
    return 1
  fi
  if ! grep -qE '(yes|WRONG)$' "$run/comm.log"; then check comm "no line of results" - FAILED; fi
  # The largest messages of each operation and type; columns as printed.
  while read -r operation type bytes bandwidth expected percent correct; do
    check "$operation $type, $bytes bytes" "$bandwidth GB/s" "$expected GB/s ($percent %)" "$([ "$correct" = yes ] && echo ok || echo WRONG)"
  done < <(awk '$NF == "yes" || $NF == "WRONG" { key = $3 " " $4; if (!(key in most)) order[++keys] = key
                  if (!(key in most) || $5 > most[key]) { most[key] = $5; line[key] = key " " $5 " " $8 " " $9 " " $10 " " $NF } }
                END { for (i = 1; i <= keys; ++i) print line[order[i]] }' "$run/comm.log")
}

# A small model on real text, whose losses can be compared: every axis divides it up to eight ways. Rounding differs by layout, and
# steps of 32k tokens average it out: on 1k tokens a step bf16 losses of layouts differ by 2e-3 after 50 steps.
small=(inputs/shapes/tiny.cfg --set model.layers=16 --set model.hidden=256 --set model.heads=8 --set model.kv_heads=8 --set model.head_size=32
  --set model.mlp=768 --set batch.sequence=1024 --set batch.micro=4 --set batch.global=32 --set optimizer.lr=3e-4 --set log.every=1)
small_steps=50 save_every=200
if [ "$gpus" -eq 0 ]; then
  small=(inputs/shapes/tiny.cfg --set precision.compute=fp32 --set model.layers=8 --set model.hidden=64
    --set model.heads=4 --set model.kv_heads=4 --set model.head_size=16 --set model.mlp=128 --set batch.sequence=64 --set batch.global=8
    --set optimizer.lr=2e-3 --set log.every=1)
  small_steps=20 save_every=40
fi
small+=(--set schedule.kind=constant --set schedule.warmup=10 --set "run.device=$device" --set "data.train=$run/text.h5")

pack_text() {
  [ -f "$run/text.h5" ] && return
  local text texts=()
  for text in ${TEXT:+"$TEXT"} /usr/share/games/fortunes src include docs README.md inputs; do
    if [ -e "$text" ]; then texts+=("$(realpath "$text")"); fi
  done
  "$octet" pack --quiet --output "$run/text.h5" "${texts[@]}"
}

# Trains the small model: small_train FOLDER RANKS SETTINGS…; the log is FOLDER.log.
small_train() {
  local folder=$1 ranks=$2 setting settings=()
  shift 2
  for setting in "$@"; do settings+=(--set "$setting"); done
  limited "${launch[@]}" -np "$ranks" "$octet" train "${small[@]}" --set "run.directory=$folder" "${settings[@]}" >"$folder.log" 2>&1
  local code=$?
  keep_log "$folder ${*:1}" "$folder.log"
  return "$code"
}

run_curve() { # name settings…
  local name=$1 code=0 one=$run/one found=$run/curve
  shift
  pack_text || return
  if [ ! -f "$one.losses" ]; then
    small_train "$one" 1 run.steps=$small_steps checkpoint.resume=none checkpoint.at_end=false || code=$?
    if [ "$code" -ne 0 ]; then
      check "curve of one GPU" "$(reason "$one.log" "$code")" - FAILED
      return 1
    fi
    losses "$one" >"$one.losses"
    local first last
    first=$(head -n 1 "$one.losses" | cut -d ' ' -f 2) last=$(tail -n 1 "$one.losses" | cut -d ' ' -f 2)
    check "curve of one GPU" "loss $(printf '%.3f to %.3f' "$first" "$last") in $small_steps steps" "falls" \
      "$(below "$last" "$(awk -v a="$first" 'BEGIN { print 0.8 * a }')" && echo ok || echo "TOO LITTLE")"
  fi
  rm -rf "$found"
  small_train "$found" "$n" run.steps=$small_steps checkpoint.resume=none checkpoint.at_end=false "$@" || code=$?
  if [ "$code" -ne 0 ]; then
    check "$name" "$(reason "$found.log" "$code")" - FAILED
    return 1
  fi
  losses "$found" >"$found.losses"
  local steps worst
  read -r steps worst < <(difference "$one.losses" "$found.losses")
  check "$name" "worst difference $worst in $steps steps" "one GPU, within 2e-3" \
    "$([ "$steps" -eq $small_steps ] && below "$worst" 2e-3 && echo ok || echo DIFFERS)"
}

curve() { row curves "curve-$1" $((gpus > 0 ? 60 : 180)) run_curve "curve-$1" "${@:2}"; }

# Lines with the second at which they came before them.
stamped() { while IFS= read -r line; do printf '%s %s\n' "$EPOCHREALTIME" "$line"; done; }

# Seconds from the line before the first one that matches to that line.
waited_for() { awk -v text="$1" 'index($0, text) { printf "%.1f\n", $1 - before; exit } { before = $1 }' "$2"; }

# Saves a model after a step and loads it in a new start: SHAPE, parameters in 10^9, deck settings…
run_checkpoint() {
  local shape=$1 billions=$2 setting settings=() code=0 free need at_end log=$run/checkpoint.log step folder=$run/checkpoint
  shift 2
  free=$(df --output=avail -B 1000000000 "$run" | tail -n 1)
  need=$(awk -v p="$billions" 'BEGIN { printf "%d", 12 * p * 1.02 + 1 }') # three float32 a parameter, whatever the state is kept in
  if [ "$gpus" -gt 0 ] && [ "$free" -lt "$need" ]; then
    check "checkpoint $shape" "not run" "needs $need GB of disk, ${free// /} are free" "no room"
    return
  fi
  pack_text || return
  local deck=("inputs/shapes/$shape.cfg" --set batch.sequence=8192 --set memory.recompute=block)
  if [ "$gpus" -eq 0 ]; then deck=("${small[@]}" --set schedule.warmup=0 --set precision.compute=bf16); fi
  for setting in "data.train=$run/text.h5" "run.directory=$folder" "run.device=$device" log.every=1 schedule.kind=constant optimizer.lr=1e-4 \
    "${small_state[@]}" "$@"; do settings+=(--set "$setting"); done
  for step in 2 4; do
    at_end=true
    if [ $step -eq 4 ]; then at_end=false; fi
    limited "${all_ranks[@]}" train "${deck[@]}" "${settings[@]}" --set run.steps=$step --set "checkpoint.at_end=$at_end" \
      2>&1 | stamped >"$log.$step"
    code=${PIPESTATUS[0]}
    cut -d ' ' -f 2- "$log.$step" >"$log"
    keep_log "checkpoint $shape" "$log.$step"
    if [ "$code" -ne 0 ]; then
      check "checkpoint $shape, start to step $step" "$(reason "$log" "$code")" - FAILED
      rm -rf "$folder"
      return 1
    fi
    grep -aE "grid|resumed|[0-9]/$step |checkpoint" "$log"
    if [ $step -eq 2 ]; then
      local bytes seconds
      bytes=$(du -sb "$folder/checkpoints" | cut -f 1) seconds=$(waited_for 'checkpoint step-' "$log.2")
      check "checkpoint $shape, save" "$seconds s" "$(awk -v b="$bytes" -v s="$seconds" 'BEGIN { printf "%.1f GB, %.2f GB/s", b / 1e9, b / 1e9 / s }')" measured
    fi
  done
  seconds=$(waited_for 'resumed from' "$log.4")
  check "checkpoint $shape, load" "$seconds s" "$(awk -v b="$bytes" -v s="$seconds" 'BEGIN { printf "%.2f GB/s", b / 1e9 / s }')" measured
  check "checkpoint $shape, losses" "$(losses "$folder" | cut -d ' ' -f 2 | xargs printf '%.3f ')" "steps 3 and 4 are of the second start" \
    "$([ "$(losses "$folder" | wc -l)" -eq 4 ] && echo ok || echo INCOMPLETE)"
  rm -rf "$folder"
}

# Process ids of a process and all below it.
descendants() {
  local child
  echo "$1"
  while read -r child; do
    descendants "$child"
  done < <(awk -v parent="$1" '$1 == "PPid:" && $2 == parent { split(FILENAME, part, "/"); print part[3] }' /proc/[0-9]*/status 2>/dev/null)
}

# Kills a rank a little after a checkpoint, and starts the same again.
run_kill() {
  local folder=$run/kill pid rank="" victims=() launcher code=0 last=0 saved settings
  pack_text || return
  settings=("checkpoint.every=$save_every" checkpoint.at_end=false)
  small_train "$folder" "$n" run.steps=1m "${settings[@]}" &
  launcher=$!
  while kill -0 "$launcher" 2>/dev/null; do
    last=$(tail -n 1 "$folder/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step":\([0-9]*\),.*/\1/p')
    if [ "${last:-0}" -ge $((save_every + 5)) ] && [ -e "$folder/checkpoints/latest" ]; then
      for pid in $(descendants "$launcher"); do
        if [ "$(readlink "/proc/$pid/exe")" = "$octet" ]; then victims+=("$pid"); fi
      done
      if [ ${#victims[@]} -gt 0 ]; then rank=${victims[-1]}; fi
      if [ -n "$rank" ]; then kill -KILL "$rank"; fi
      break
    fi
    sleep 0.05
  done
  if [ -z "$rank" ]; then kill "$launcher" 2>/dev/null; fi
  wait "$launcher" 2>/dev/null || code=$?
  if [ -z "$rank" ]; then
    check "kill" "$(reason "$folder.log" "$code")" "no rank was found to kill" FAILED
    return 1
  fi
  losses "$folder" >"$folder.before"
  last=$(tail -n 1 "$folder.before" | cut -d ' ' -f 1)
  check "kill: process ${#victims[@]} of ${#victims[@]}" "the job ended with exit $code at step $last" "not 0, soon" "$([ "$code" -ne 0 ] && echo ok || echo WRONG)"
  code=0
  small_train "$folder" "$n" "run.steps=$((last + 10))" "${settings[@]}" || code=$?
  saved=$(sed -n 's/^resumed from .* at step \([0-9]*\):.*/\1/p' "$folder.log")
  if [ "$code" -ne 0 ] || [ -z "$saved" ]; then
    check "kill: second start" "$(reason "$folder.log" "$code")" "resumes" FAILED
    return 1
  fi
  losses "$folder" >"$folder.after"
  awk -v saved="$saved" '$1 > saved' "$folder.after" >"$folder.again"
  local steps worst
  read -r steps worst < <(difference "$folder.before" "$folder.again")
  check "kill: second start" "from step $saved; $steps steps done again differ by $worst" "within 1e-3" \
    "$(below "$worst" 1e-3 && echo ok || echo DIFFERS)"
  check "kill: loss" "$(awk -v s="$saved" -v l="$last" 'NR == 1 { printf "%.3f at step 1, ", $2 } $1 == s { printf "%.3f at %d, ", $2, $1 }
    $1 == l { printf "%.3f at %d, ", $2, $1 } END { printf "%.3f at %d", $2, $1 }' "$folder.after")" "below the first" \
    "$(below "$(tail -n 1 "$folder.after" | cut -d ' ' -f 2)" "$(head -n 1 "$folder.after" | cut -d ' ' -f 2)" && echo ok || echo WRONG)"
}

row comm comm 90 run_comm
two="batch.micro=2+memory.logits_mib=4200" # all logits at once
for work in "llama-8b-zero2@$n+$two" "llama-8b-fp8@$n+$two" "llama-8b-zero2@$n" "llama-8b-fp8@$n" "llama-8b@$n" \
  "llama-8b-two@$n+$two" "llama-8b-two@$n+$two+precision.fp8=delayed+precision.fp8_gather=true"; do
  work_row 8b "$work$CHANGES" 80
done
for ((ranks = 1; ranks <= n; ranks *= 2)); do work_row scaling "llama-8b-two@$ranks$CHANGES" 60; done

curve data-zero1 parallel.zero=1
curve data-zero2 parallel.zero=2
curve data-zero3 parallel.zero=3
curve tensor "parallel.tensor=$n" parallel.sequence=true
curve pipeline "parallel.pipeline=$n"
curve interleaved "parallel.pipeline=$n" parallel.schedule=interleaved parallel.chunks=2
curve zerobubble "parallel.pipeline=$n" parallel.schedule=zero_bubble
curve context "parallel.context=$n"
if [ "$n" -ge 4 ]; then
  curve cube parallel.tensor=2 parallel.sequence=true parallel.pipeline=2 parallel.zero=2
  curve context-cube parallel.tensor=2 parallel.context=2 parallel.zero=3
fi

layouts=(tensor pipeline context)
if [ "$n" -ge 4 ]; then layouts+=(cube); fi
for layout in "${layouts[@]}" zerobubble interleaved; do work_row layouts "llama-8b-$layout@$n$CHANGES" 90; done

work_row gpt2 "gpt2-1558m@$n" 60
work_row gpt2 "gpt2-1558m-fp8@$n" 60

STEPS=8 # steps of seconds: the median of three
work_row 70b "llama-70b-zero3@$n" 200
work_row 70b "llama-70b-tensor2@$n" 200
work_row 70b "llama-70b-tensor@$n" 200
work_row 70b "llama-70b-zero3@$n+optimizer.moments=8bit" 200

row kill kill 90 run_kill
row checkpoint checkpoint-8b 300 run_checkpoint llama-8b 8.03 parallel.zero=1
if [ "$n" -eq 8 ]; then row checkpoint checkpoint-70b 500 run_checkpoint llama-70b 70.6 parallel.zero=3 memory.logits_mib=256; fi

finish
