#!/usr/bin/env bash
# Checks the sources with the tools that are installed: lint.sh BUILD (a build folder, for its compile commands).
set -uo pipefail
cd "$(dirname "$0")/.." || exit
build=$1
status=0

have() {
  command -v "$1" >/dev/null && return 0
  echo "lint: $1 is not installed, left out"
  return 1
}

if have clang-format; then
  find include src tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 clang-format --dry-run -Werror || status=1
fi
if have cppcheck; then
  cppcheck --quiet --std=c++20 --language=c++ --inline-suppr --error-exitcode=1 --enable=warning,performance,portability \
    --suppress=missingIncludeSystem -I include src || status=1
fi
if have clang-tidy; then
  find src -name '*.cpp' -not -path '*cuda*' -not -path '*nccl*' -print0 |
    xargs -0 -P "$(nproc)" -n 4 clang-tidy -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option || status=1
fi
if have shellcheck; then
  shellcheck cmake/*.sh jobs/*.sh jobs/*.sbatch tests/*.sh .ci/run || status=1
fi
exit $status
