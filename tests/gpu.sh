#!/usr/bin/env bash
# The tests of a built folder that need a GPU: gpu.sh BUILD [RANKS…]. None may be skipped. Prints a line a run, last.
set -uo pipefail
build=$1
shift
ranks=("$@")
if [ ${#ranks[@]} -eq 0 ]; then ranks=(1 2 4 8); fi
rows=(unit-new unit-rest)
for n in "${ranks[@]}"; do rows+=("mpi_$n-new" "mpi_$n-rest"); done
BUDGET=${BUDGET:-100000} exec "$(dirname "$0")/gpu_session.sh" "$build" "${rows[@]}"
