#!/usr/bin/env bash
# Looks for wrong memory accesses and races of short runs on a GPU with compute-sanitizer.
#
#     scripts/gpu_sanitize.sh
#
# memcheck watches the steps of scripts/smoke.py, which page parameters, gradients and state through
# NVMe; racecheck watches two calls of each device kernel. Needs compute-sanitizer, which comes with
# CUDA, and the package: PYTHONPATH=.device-site where device_smoke.sh installed it. Takes about two
# minutes; exit status 1 says that something was found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Blocks that torch keeps for later would hide what is read beyond a tensor's end.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
sanitize() {
  local tool=$1
  shift
  echo "== $tool: $*"
  compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all "$@"
}

sanitize memcheck python3 scripts/smoke.py
sanitize racecheck python3 scripts/kernel_bench.py --device-numel 65536 --numel 65536 --rounds 1
