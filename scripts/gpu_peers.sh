#!/usr/bin/env bash
# Prepares the package and DeepSpeed on a machine with a GPU and no package index, then runs rows of
# the GPU benchmark on both sides.
#
#     scripts/gpu_peers.sh OUT SECONDS [GROUP ...]    groups of gpu_suite.py: host nvme lossy param torch
#     scripts/gpu_peers.sh OUT SECONDS kernels        kernel_bench.py beside DeepSpeed's CPU Adam
#
# OUT.tgz is written anew after each group; kernels writes OUT.json. The folder .peer holds what DeepSpeed needs there:
#     ds.tgz        its unpacked source distribution: deepspeed csrc op_builder accelerator version.txt
#     aio/include, aio/lib    libaio.h and libaio.so
#     whl           wheels of what that machine's Python lacks
# Preparing takes a minute; what is there already is not made again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if (($# < 2)) || [[ $1 == -* ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
out=$1 seconds=$2
shift 2
if [[ ! -f .peer/ds.tgz ]]; then
  echo "gpu_peers.sh: there is no .peer/ds.tgz; scripts/gpu_peers.sh --help says what .peer holds" >&2
  exit 2
fi

peer=$PWD/.peer made=${TMPDIR:-/tmp}/tierzero-peer
export LD_LIBRARY_PATH=$peer/aio/lib:${LD_LIBRARY_PATH:-} LIBRARY_PATH=$peer/aio/lib
export CPATH=$peer/aio/include CFLAGS="-I$peer/aio/include" LDFLAGS="-L$peer/aio/lib"
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
# DeepSpeed cannot read the letters of architectures such as 9.0a.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST//[a-z]/} TOKENIZERS_PARALLELISM=false

prepare_peer() {
  mkdir -p "$made/ds" "$made/site"
  tar -xzf "$peer/ds.tgz" -C "$made/ds"
  ln -sfn ../../csrc "$made/ds/deepspeed/ops/csrc"
  ln -sfn ../../op_builder "$made/ds/deepspeed/ops/op_builder"
  cp -rn "$made/ds/accelerator" "$made/ds/deepspeed/accelerator" 2>/dev/null || true
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$made/site" \
    "$peer"/whl/*.whl
  local builder jobs=()
  for builder in CPUAdamBuilder AsyncIOBuilder UtilsBuilder; do
    PYTHONPATH=$made/ds:$made/site python3 -c \
      "from deepspeed.ops.op_builder import $builder as B; B().load(verbose=False)" \
      >"$made/$builder.log" 2>&1 &
    jobs+=($!)
  done
  wait "${jobs[@]}"
  touch "$made/ready"
}

# An interpreter that has DeepSpeed, and the operators as they were compiled: for CUDA if there is
# a GPU.
write_peer_python() {
  local accelerator
  accelerator=$(python3 -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')")
  cat >"$made/python" <<PYTHON
#!/usr/bin/env bash
export PYTHONPATH=$made/ds:$made/site DS_ACCELERATOR=$accelerator
exec $(command -v python3) "\$@"
PYTHON
  chmod +x "$made/python"
}

begin=$SECONDS
jobs=()
if [[ ! -e $made/ready ]]; then
  prepare_peer &
  jobs+=($!)
fi
if [[ ! -d .device-site/zero ]]; then
  bash scripts/device_smoke.sh >"${TMPDIR:-/tmp}/tierzero-smoke.log" 2>&1 &
  jobs+=($!)
fi
for job in "${jobs[@]}"; do
  wait "$job" || { tail -n 5 "$made"/*.log "${TMPDIR:-/tmp}/tierzero-smoke.log"; exit 1; }
done
echo "prepared in $((SECONDS - begin)) s"

if [[ ${1:-} == kernels ]]; then
  write_peer_python
  export PYTHONPATH=$PWD/.device-site PYTHONUNBUFFERED=1
  exec timeout "$seconds" python3 scripts/kernel_bench.py --rounds 7 --json "$out.json" \
    --peer "$made/python"
fi
export PYTHONPATH=$PWD/.device-site:$made/ds:$made/site PYTHONUNBUFFERED=1
exec python3 scripts/gpu_suite.py --out "$out" \
  --nvme "${TMPDIR:-/tmp}/tierzero-swap" --seconds "$seconds" ${1:+--only "$@"}
