"""Runs the peer's program and adds what its process took before it began.

    gpu_peer.py PROGRAM CASE [ARGUMENT ...]

The libraries that the program needs are imported and the device is opened first; then the resident
memory is noted, and the program runs in the same process. Its last line is JSON; this one's is the
same with `baseline_bytes`. Models of transformers draw their initial weights on the device, which
takes a second instead of half a minute and no host memory; ours draws the same. The cases `gpu`
and `fsdp2` are plain torch's: DeepSpeed is not imported for them, and FSDP2's model is made on the
host, whence it is taken in parts.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_process import resident

_TORCH_CASES = ("gpu", "fsdp2")
_BUILT_ELSEWHERE = ("nvme_param", "fsdp2")
"""There it is the peer that says where modules are built."""


def run(program: str, arguments: list[str]) -> dict[str, Any]:
    """Run a program and return what its last line says, with the baseline of its process."""
    case = arguments[0]
    if case not in _TORCH_CASES:
        importlib.import_module("deepspeed")  # only its memory counts
    import torch

    importlib.import_module("transformers.models.llama.modeling_llama")

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        if case not in _BUILT_ELSEWHERE:
            build_on_device("cuda")
    baseline = resident()["VmRSS"]
    sys.argv = [program, *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(program, run_name="__main__")
    found: dict[str, Any] = json.loads(output.getvalue().strip().splitlines()[-1])
    return {**found, "baseline_bytes": baseline}


def build_on_device(device: str) -> None:
    """Let models be built on a device, from here on."""
    import torch

    model: Any = importlib.import_module("transformers").LlamaForCausalLM
    plain = model.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device(device):
            plain(self, *args, **kwargs)

    model.__init__ = initialise


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2:])))
