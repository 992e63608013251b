#!/usr/bin/env bash
# Sets everything up and runs the fast suite, then the movers' tests once more under python -O.
# Arguments go to pytest; the full suite is scripts/test_full.sh.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
# shellcheck source-path=SCRIPTDIR source=run_pytest.sh
source scripts/run_pytest.sh
run_suites "not full" "$@"
