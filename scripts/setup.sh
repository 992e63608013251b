#!/usr/bin/env bash
# Prepares .venv with torch and tierzero in it. The other scripts source this file:
#
#     source scripts/setup.sh [test]     "test" adds the tools and test packages of the extra [test]
#
# Sets VENV_PYTHON and exports PYTHONSAFEPATH=1, and TIERZERO_REQUIRE_NATIVE=1 where the native modules
# can be built, so that a failed build fails here and does not become a silent fallback.
# PYTHON names the interpreter to make the environment with, if the one found is not wanted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 2
}

# Prints the first interpreter that is new enough and can make a virtual environment.
find_python() {
  local candidate too_bare=""
  if [[ -n ${PYTHON:-} ]] && ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    fail "PYTHON=$PYTHON is not a Python of 3.11 or newer: name another, or leave PYTHON unset"
  fi
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
    too_bare=$candidate
  done
  if [[ -n $too_bare ]]; then
    fail "$too_bare has no ensurepip or venv module: install it (on Debian: python3-venv) and try again"
  fi
  fail "Python 3.11 or newer was not found on PATH: install it, or name it as PYTHON=/path/to/python"
}

make_venv() {
  local python
  if .venv/bin/python -m pip --version >/dev/null 2>&1; then
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      fail "the Python of .venv is older than 3.11: remove the folder .venv and try again"
    if [[ -n ${PYTHON:-} && $("$PYTHON" --version 2>&1) != "$(.venv/bin/python --version 2>&1)" ]]; then
      say ".venv has $(.venv/bin/python --version), not that of PYTHON=$PYTHON: remove the folder .venv to change it"
    fi
    return
  fi
  python=$(find_python)
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || fail "$python -m venv .venv failed: remove the folder .venv and try again"
}

install_torch() {
  if "$VENV_PYTHON" - <<'PYTHON' 2>/dev/null; then
from importlib.metadata import version

raise SystemExit([int(part) for part in version("torch").split(".")[:2]] < [2, 11])
PYTHON
    return
  fi
  say "installing torch (the largest download)"
  pip_install torch==2.13.0 || pip_install 'torch>=2.11' ||
    fail "torch 2.11 or newer could not be installed: see pip's message above"
}

pip_install() { "$VENV_PYTHON" -m pip install -q --disable-pip-version-check "$@"; }

# Prints why the native modules cannot be built, or nothing when they can.
native_obstacle() {
  local include source
  source=$(mktemp -d)
  include=$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  printf '#include <span>\nint main() { return std::span<int>().size() == 0 ? 0 : 1; }\n' >"$source/language.cpp"
  printf '#include <Python.h>\nint main() { return 0; }\n' >"$source/headers.cpp"
  if ! compile "$source/language.cpp" -o "$source/language"; then
    echo "no C++20 compiler"
  elif ! compile "$source/headers.cpp" -fsyntax-only "-I$include"; then
    echo "no headers of this Python (on Debian: python3-dev)"
  fi
  rm -rf "$source"
}

# The compiler that CMake would take: CXX if it is set, else the first of the usual names.
compile() {
  local candidate command=()
  read -ra command <<<"${CXX:-}" # CXX may hold arguments, as in "ccache g++"
  for candidate in c++ g++ clang++; do
    if ((${#command[@]} == 0)) && command -v "$candidate" >/dev/null; then
      command=("$candidate")
    fi
  done
  ((${#command[@]} > 0)) && "${command[@]}" -std=c++20 "$@" >/dev/null 2>&1
}

# Everything that an installation depends on: it is editable, so of Python files only which there are.
fingerprint() {
  {
    printf '%s\n' "$PWD" "$TIERZERO_REQUIRE_NATIVE" "$("$VENV_PYTHON" --version)"
    find pyproject.toml CMakeLists.txt ./*/csrc -type f -exec sha256sum {} + | LC_ALL=C sort
    find aio_ops estimators offload zero -name '*.py' | LC_ALL=C sort
  } | sha256sum
}

install_package() {
  local extra=$1 stamp=.venv/tierzero-installed wanted
  wanted=$(fingerprint)
  if [[ -f $stamp ]] && grep -qxF -e "$wanted $extra" -e "$wanted test" "$stamp"; then
    return
  fi
  rm -f "$stamp"
  say "installing tierzero${extra:+ and its $extra tools}"
  pip_install -e ".${extra:+[$extra]}" || fail "tierzero could not be installed: see the messages above"
  printf '%s\n' "$wanted $extra" >"$stamp"
}

set_up() {
  local obstacle
  [[ $(uname -s) == Linux ]] || fail "tierzero runs on Linux only, and this is $(uname -s)"
  make_venv
  VENV_PYTHON=$PWD/.venv/bin/python
  export PYTHONSAFEPATH=1
  install_torch
  obstacle=$(native_obstacle)
  if [[ -z $obstacle ]]; then
    export TIERZERO_REQUIRE_NATIVE=1
  else
    say "$obstacle: the pure-Python engine and kernels serve"
    export TIERZERO_REQUIRE_NATIVE=false
  fi
  install_package "${1:-}"
  if [[ -n $obstacle ]]; then
    unset TIERZERO_REQUIRE_NATIVE
  fi
}

set_up "$@"
