#!/usr/bin/env bash
# Sets everything up and runs every test, those marked "full" too, and the native ones under each
# sanitizer. Arguments go to pytest.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
# shellcheck source-path=SCRIPTDIR source=native_tests.sh
source scripts/native_tests.sh
# shellcheck source-path=SCRIPTDIR source=run_pytest.sh
source scripts/run_pytest.sh
run_native_tests
run_suites "" "$@"
