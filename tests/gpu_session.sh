#!/usr/bin/env bash
# What a loan of one or two GPUs is used for, most valuable first: gpu_session.sh BUILD [PART|ROW…]. BUILD holds octet and its test
# programs, together or as make leaves them. Every row has a time limit; rows that BUDGET (570 s) has no time for are left, with the
# words for another call as the last line. If OUT is set: $OUT/gpu_session.md, .json, and runs.log.
#   new        tests of what has not run on a GPU yet, on one rank and on two
#   speed      comparisons of settings: 8B, 1B, 3B, GPT-2, Qwen2.5 7B; the rival beside them where RIVAL is set (jobs/works.sh)
#   unit, mpi_1, mpi_2, mpi_4, mpi_8   all GPU tests, the new ones left out
#   sanitizer  memcheck and racecheck of new kernels
#   curves     precision_curves.sh: every fp8 recipe against bf16 on the text of TEXT (a folder; fortunes unless set)
# OCTET_CPU=1 tries the script on CPU ranks: a few CPU tests and tiny works.
set -uo pipefail
export LC_ALL=C.UTF-8
build=$(realpath "$1")
shift
cd "$(dirname "$0")/.." || exit
octet=$build/octet tests=$build
if [ -d "$build/tests" ]; then tests=$build/tests; fi
# shellcheck source=jobs/ranks.sh
. jobs/ranks.sh
# shellcheck source=jobs/works.sh
. jobs/works.sh
if [ "$gpus" -eq 0 ] && [ -z "${OCTET_CPU:-}" ]; then
  echo "gpu_session: no GPU that $octet can use (OCTET_CPU=1 tries the script without)"
  exit 0
fi
wanted=("$@") results=gpu_session again="tests/gpu_session.sh $build"
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
STEPS=${STEPS:-20}
if [ -n "${OCTET_CPU:-}" ]; then STEPS=6; fi
machine=$(nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader 2>/dev/null | sed -n 1p)
title="$gpus GPUs: ${machine:-none}; $("$octet" --version | sed -n '1s/  */ /gp'); $(date -u +%FT%TZ)"
# shellcheck source=jobs/rows.sh
. jobs/rows.sh

# Runs a program of tests and adds a line to the checks: tests NAME FILTER PROGRAM…
run_tests() {
  local name=$1 filter=$2 code=0 log=$run/tests.log verdict=ok failed
  shift 2
  limited env OCTET_REQUIRE_GPU=1 OMPI_MCA_mpi_yield_when_idle=1 "$@" --gtest_filter="$filter" --gtest_color=no >"$log" 2>&1 || code=$?
  keep_log "$name" "$log"
  grep -aE "Failure|FAILED|[Ee]rror|actual|exceeds|Skipped|rank .* of|ERROR SUMMARY|RACECHECK SUMMARY" "$log" | head -n 40
  failed=$(sed -n 's/^\[  FAILED  \] \([^ ,]*\).*/\1/p' "$log" | sort -u | head -n 4 | xargs)
  if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    failed="stopped after $LIMIT s in $(sed -n 's/^\[ RUN      \] //p' "$log" | tail -n 1)"
  fi
  if [ "$code" -ne 0 ]; then verdict="FAILED, exit $code"; elif ! grep -qaE '\[  PASSED  \] [1-9]' "$log"; then verdict="NO TEST"; fi
  check "$name" "$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1 passed/p' "$log" | tail -n 1)${failed:+ $failed}" \
    "$(grep -aE '=+ (ERROR|RACECHECK) SUMMARY' "$log" | tail -n 1 | sed 's/=* *//')" "$verdict"
}

unit_row() { row "$1" "$2" "$3" run_tests "$2" "$4" "$tests/octet_unit_tests"; } # part name seconds filter

mpi_row() { # part name seconds ranks filter
  row "$1" "$2" "$3" run_tests "$2" "$5" mpirun --oversubscribe --allow-run-as-root --bind-to none -np "$4" "$tests/octet_mpi_tests"
}

sanitize() { # name tool filter
  local options=(--tool "$2" --error-exitcode 99 --print-limit 10)
  if ! command -v compute-sanitizer >/dev/null; then
    check "$1" - "no compute-sanitizer" "not run"
    return
  fi
  # Kernels of libraries are theirs to check.
  if compute-sanitizer --help 2>&1 | grep -q -e '--kernel-regex'; then options+=(--kernel-regex kns=octet); fi
  run_tests "$1" "$3" compute-sanitizer "${options[@]}" "$tests/octet_unit_tests"
}

run_curves() {
  local code=0 log=$run/precision_curves.log text=${TEXT:-/usr/share/games/fortunes} line
  if [ ! -e "$text" ]; then text=src; fi
  local shape=${SETTINGS:-} key
  if [ "$device" = cuda ] && [ -z "$shape" ]; then # 100 M parameters
    for key in model.layers=8 model.hidden=1024 model.heads=16 model.kv_heads=4 model.head_size=64 model.mlp=2816 \
      batch.sequence=256 optimizer.lr=6e-4 schedule.warmup=100; do shape+=" --set $key"; done
  fi
  SETTINGS=$shape STEPS=500 limited tests/precision_curves.sh "$octet" "$text" >"$log" 2>&1 || code=$?
  cat "$log"
  while read -r line; do check curves "${line%,*}" "${line##*, }" measured; done < <(grep '^fp8' "$log")
  check curves "exit $code" "within 1 %" "$([ "$code" -eq 0 ] && echo ok || echo FAILED)"
}

# The newest tests, which run first; on two GPUs of their own, stage messages and collectives beside products too.
new_unit='*Cuda*OwnAttention*:*Cuda*Float8*:*Cuda*OwnProducts*:*Cuda*OutputCodes*:*Cuda*Epilogue*:*Cuda*CrossEntropy*'
new_mpi='Fp8Gather.Cuda*:FusedProducts.Cuda*:Fp8.Cuda*:Overlap.Cuda*:CommunicatorTest.Cuda*:*CudaFewThreadBlocks*'
old_unit="*Cuda*-$new_unit" old_mpi="*Cuda*-$new_mpi"
if [ "$device" = cpu ]; then
  new_unit='Cpu/Float8*' old_unit='Cpu/Norm*' new_mpi='CommunicatorTest.Collectives*' old_mpi="CommunicatorTest.*-*Cuda*:$new_mpi"
fi

unit_row new unit-new 120 "$new_unit"
mpi_row new mpi_2-new 200 2 "$new_mpi"
mpi_row new mpi_1-new 150 1 "$new_mpi"

speed() { work_row speed "$1" 80; }
if [ "$device" = cpu ] || [ "$gpus" -gt 1 ]; then
  speed llama-8b
  speed llama-8b+run.matmul=cublas
  speed llama-8b+parallel.overlap_optimizer=true
  speed llama-8b-fp8
  speed llama-8b-fp8+precision.fp8_gather=false
  speed llama-8b-fp8+run.tune_matmul=true
  speed llama-8b-two
  speed llama-8b-one
fi
speed llama-1b
speed llama-1b+run.matmul=cublas
speed llama-1b-fp8
speed gpt2-124m
speed gpt2-124m+run.fuse_matmul=false

unit_row unit unit-rest 120 "$old_unit"
mpi_row mpi_2 mpi_2-rest 250 2 "$old_mpi"
mpi_row mpi_1 mpi_1-rest 150 1 "$old_mpi"

for tool in memcheck racecheck; do
  row sanitizer "$tool-quantize" 120 sanitize "$tool-quantize" "$tool" '*Cuda*Float8Test*'
  row sanitizer "$tool-narrow_adamw" 120 sanitize "$tool-narrow_adamw" "$tool" '*Cuda*NarrowStateTest*-*Unbiased*'
  row sanitizer "$tool-tile_attention" 120 sanitize "$tool-tile_attention" "$tool" '*Cuda*AttentionRowsTest.*Documents*bfloat16:*Cuda*AttentionRowsTest.ADocument*bfloat16'
done
if [ "$device" = cuda ]; then
  row curves curves 200 run_curves
  if [ "$gpus" -gt 1 ]; then speed llama-8b-fp8+precision.fp8=block+precision.fp8_gather=false; fi # the tiny model of CPU ranks is too narrow for these blocks
fi

if [ "$device" = cpu ] || [ "$gpus" -gt 1 ]; then
  for work in -fp8+precision.fp8=current +parallel.nccl_max_ctas=8 -two+batch.micro=2 -tensor2 -pipeline2 \
    -interleaved2 -zerobubble2 -context2 -32k -128k; do speed "llama-8b$work"; done
fi
for work in llama-3b llama-3b-fp8 gpt2-1558m gpt2-1558m-fp8 qwen2.5-7b qwen2.5-7b-fp8; do speed "$work"; done

for ranks in 4 8; do
  mpi_row "mpi_$ranks" "mpi_$ranks-new" 250 "$ranks" "$new_mpi"
  mpi_row "mpi_$ranks" "mpi_$ranks-rest" 300 "$ranks" "$old_mpi"
done
finish
