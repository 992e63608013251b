#!/usr/bin/env bash
# Builds and checks the package in seconds on a machine with torch but no package index: native
# modules, kernel parity, one tiny step. Run it before anything else there.
#
#     scripts/device_smoke.sh          uses the machine's own Python and torch, and wheels of what it
#                                      lacks (pydantic, rich) from the folder .wheels
#     scripts/device_smoke.sh --cpu    the same checks in .venv, on the machine you develop on
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == --cpu ]]; then
  # shellcheck source-path=SCRIPTDIR source=setup.sh
  source scripts/setup.sh ""
  exec "$VENV_PYTHON" scripts/smoke.py
fi

python3 -m venv --system-site-packages .venv-device
if compgen -G ".wheels/*.whl" >/dev/null; then
  .venv-device/bin/pip install -q --no-index --no-deps .wheels/*.whl
fi
TIERZERO_REQUIRE_NATIVE=1 .venv-device/bin/pip install -q --no-index --no-deps --no-build-isolation -e .
exec .venv-device/bin/python scripts/smoke.py
