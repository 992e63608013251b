#!/usr/bin/env bash
# Compiles the native cores for aarch64, with the flags and warnings of the build, to see that they
# would; nothing is linked or run. Skipped, with a line that says so, where no cross compiler is.
#
#     scripts/cross_compile.sh      needs aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compiler=${AARCH64_CXX:-aarch64-linux-gnu-g++}
if ! command -v "$compiler" >/dev/null; then
  echo "cross compile: skipped, because $compiler is not there (Debian: g++-aarch64-linux-gnu)"
  exit 0
fi
for source in aio_ops/csrc/*.cpp offload/csrc/*.cpp; do
  case $source in
    */bindings*.cpp) continue ;;  # Python's headers are those of the machine that runs it
  esac
  "$compiler" -std=c++20 -O3 -fPIC -ffp-contract=off -fno-math-errno -Wall -Wextra -Wconversion \
    -Wshadow -Werror -c "$source" -o /dev/null
done
echo "cross compile: the native cores compile for aarch64 ($("$compiler" -dumpversion))"
