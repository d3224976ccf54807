#!/usr/bin/env bash
# The tests of a built folder that need a GPU: gpu.sh BUILD [RANKS…]. None may be skipped. Prints a line a run, last.
set -uo pipefail
build=$1
shift
ranks=("$@")
if [ ${#ranks[@]} -eq 0 ]; then ranks=(1 2 4 8); fi
export OCTET_REQUIRE_GPU=1 OMPI_MCA_mpi_yield_when_idle=1 OPENBLAS_NUM_THREADS=1
log=$(mktemp -d)
failed=0
summary=""
one() { # name command…
  local name=$1
  shift
  "$@" --gtest_filter='*Cuda*' --gtest_color=no >"$log/$name.log" 2>&1
  local code=$?
  grep -aE "Failure|FAILED|error|actual|exceeds|Skipped|rank .* of" "$log/$name.log" | head -n 40
  summary+="$name: exit $code, $(grep -aE 'PASSED|tests ran' "$log/$name.log" | tail -n 1)"$'\n'
  [ "$code" -eq 0 ] || failed=1
}
one unit "$build/octet_unit_tests"
for n in "${ranks[@]}"; do
  one "mpi_$n" mpirun --oversubscribe --allow-run-as-root --bind-to none -np "$n" "$build/octet_mpi_tests"
done
[ -n "${OUT:-}" ] && cp "$log"/*.log "$OUT"/
printf '%s' "$summary"
exit $failed
