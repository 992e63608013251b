#!/usr/bin/env bash
# Sourced by test.sh and test_full.sh after setup.sh: runs pytest on everything, and under python -O.
set -euo pipefail

CLOSING_LINES=()

# Runs pytest with the Python options before "--" and the pytest options after it, and keeps the line
# that it closes with.
run_pytest() {
  local python_options=() log status=0
  while [[ $1 != -- ]]; do
    python_options+=("$1")
    shift
  done
  shift
  if [[ -t 1 ]]; then
    set -- --color=yes "$@"
  fi
  log=$(mktemp)
  "$VENV_PYTHON" "${python_options[@]}" -m pytest "$@" 2>&1 | tee "$log" || status=$?
  CLOSING_LINES+=("$(tail -n 1 "$log")")
  rm -f "$log"
  return "$status"
}

# Runs the tests that a marker expression selects, then the movers' ones under -O, where an assert of
# the product does nothing. With a path among the further arguments only that is run, once.
run_suites() {
  local selected=(-m "$1") argument plain=0 optimized=0
  shift
  export OMP_NUM_THREADS=1
  for argument in "$@"; do
    if [[ $argument == */* && -e ${argument%%::*} ]]; then
      run_pytest -- "${selected[@]}" "$@"
      return
    fi
  done
  run_pytest -- "${selected[@]}" tests "$@" || plain=$?
  run_pytest -O -W default -- "${selected[@]}" tests/offload --ignore=tests/offload/test_kernels.py \
    tests/aio_ops/test_faults.py tests/aio_ops/test_simulated.py \
    tests/zero/test_faults.py tests/zero/test_starvation.py "$@" || optimized=$?
  if ((optimized == 5 && plain != 5 && $# > 0)); then
    optimized=0 # the tests that the caller chose are elsewhere
  fi
  printf '\nClosing lines of the tests under python -O, and of all tests:\n'
  printf '%s\n' "${CLOSING_LINES[1]}" "${CLOSING_LINES[0]}"
  return $((plain != 0 ? plain : optimized))
}
