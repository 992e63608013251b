#!/usr/bin/env bash
# Every check of this repository: linters, types, layers, formats, native tests under each sanitizer,
# and the fast suite. Stops at the first that fails.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
# shellcheck source-path=SCRIPTDIR source=native_tests.sh
source scripts/native_tests.sh

step() {
  printf 'check: %s\n' "$*"
  "$@"
}

mapfile -d '' cpp_sources < <(
  find aio_ops offload tests -type f \( -name '*.cpp' -o -name '*.h' \) -print0
)
mapfile -t python_scripts < <(find scripts -name '*.py' | LC_ALL=C sort)

export PATH=$PWD/.venv/bin:$PATH
step ruff check .
step ruff format --check .
step mypy
MYPYPATH=scripts step mypy "${python_scripts[@]}"
step lint-imports
step clang-format --dry-run -Werror "${cpp_sources[@]}"
if command -v shellcheck >/dev/null; then
  step shellcheck -x scripts/*.sh .ci/run
fi
step scripts/cross_compile.sh
run_native_tests
exec bash scripts/test.sh "$@"
