#!/usr/bin/env bash
# Builds and checks the package in seconds on a machine with torch but no package index: native
# modules, kernel parity, one tiny step. Run it before anything else there.
#
#     scripts/device_smoke.sh          uses the machine's own Python and torch, and wheels of what it
#                                      lacks (pydantic, pydantic-core, annotated-types and
#                                      typing-inspection, say) from the folder .wheels
#     scripts/device_smoke.sh --cpu    the same checks in .venv, on the machine you develop on
#
# Afterwards, PYTHONPATH=.device-site python3 has the package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if (($# > 1)) || [[ ${1:---cpu} != --cpu ]]; then
  sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed 1d
  exit 2
fi

if [[ ${1:-} == --cpu ]]; then
  # shellcheck source-path=SCRIPTDIR source=setup.sh
  source scripts/setup.sh ""
  exec "$VENV_PYTHON" scripts/smoke.py
fi

install=(python3 -m pip install -q --no-index --no-deps --upgrade --target .device-site)
if compgen -G ".wheels/*.whl" >/dev/null; then
  "${install[@]}" .wheels/*.whl
fi
export PYTHONPATH=$PWD/.device-site
TIERZERO_REQUIRE_NATIVE=1 "${install[@]}" --no-build-isolation .
exec python3 scripts/smoke.py
