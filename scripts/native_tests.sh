#!/usr/bin/env bash
# Builds the native test binaries and runs them by ctest: plain, under ASan with UBSan, and under TSan.
# Sourced by check.sh and test_full.sh after setup.sh.
set -euo pipefail

# Puts cmake, ctest and ninja on PATH: those of the system, else from the package index into .venv.
find_build_tools() {
  PATH=$PATH:$PWD/.venv/bin
  if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then
    "$VENV_PYTHON" -m pip install -q --disable-pip-version-check cmake ninja
  fi
}

# Runs a command without address space randomisation where that may be switched off: with the many
# random bits of recent kernels, TSan's fixed shadow does not always fit.
run_unrandomised() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then
    setarch "$(uname -m)" -R "$@"
  else
    "$@"
  fi
}

run_native_tests() {
  local sanitizers folder
  if [[ ${TIERZERO_REQUIRE_NATIVE:-} != 1 ]]; then
    echo "native tests: skipped, because setup found that the native modules cannot be built here"
    return
  fi
  find_build_tools
  for sanitizers in "" address,undefined thread; do
    folder=build/native-${sanitizers:-plain}
    echo "native tests: ${sanitizers:-no sanitizer}"
    cmake -S . -B "$folder" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
      -DTIERZERO_BUILD_TESTS=ON -DTIERZERO_SANITIZE="$sanitizers" >/dev/null
    cmake --build "$folder" -- --quiet
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
      run_unrandomised ctest --test-dir "$folder" --output-on-failure --no-tests=error --timeout 300
  done
}
