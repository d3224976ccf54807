#!/usr/bin/env bash
# Runs the tests of a build folder: run.sh BUILD [ctest options]. Says why tests were skipped, and closes with ctest's
# own summary line.
set -uo pipefail
build=$1
shift
export CTEST_OUTPUT_ON_FAILURE=1
ctest --test-dir "$build" "$@" | tee "$build/ctest.log"
code=${PIPESTATUS[0]}

# GoogleTest prints FILE:LINE: Skipped, and the reason on the next line.
reasons=$(awk '/: Skipped$/ { getline; count[$0]++ }
               END { for (reason in count) printf "  %d skipped: %s\n", count[reason], reason }' \
  "$build/Testing/Temporary/LastTest.log")
if [ -n "$reasons" ]; then printf '\nTests that this machine could not run:\n%s\n' "$reasons"; fi
without_cuda=$(sed -n 's/^OCTET_CUDA_MISSING:INTERNAL=//p' "$build/CMakeCache.txt")
if [ -n "$without_cuda" ]; then printf '\nGPU tests were not built: %s\n' "$without_cuda"; fi
echo
grep 'tests passed' "$build/ctest.log"
exit "$code"
