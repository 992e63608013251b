#!/usr/bin/env bash
# Sets everything up and trains a small transformer whose state lives on NVMe.
# Arguments go to scripts/train_lm.py: see bash scripts/demo.sh --help.
set -euo pipefail
start=$PWD # setup.sh moves to the repository; paths in the arguments are meant from here
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ""
scripts=$PWD/scripts
cd "$start"
exec "$VENV_PYTHON" "$scripts/train_lm.py" --config "$scripts/configs/zero3_nvme.json" "$@"
