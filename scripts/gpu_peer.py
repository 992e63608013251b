"""Runs the peer's program and adds what its process took before it began.

    gpu_peer.py PROGRAM CASE [ARGUMENT ...]

The libraries that the program needs are imported and the device is opened first; then the resident
memory is noted, and the program runs in the same process. Its last line is JSON; this one's is the
same with `baseline_bytes`. Models of transformers draw their initial weights on the device, which
takes a second instead of half a minute and no host memory; ours draws the same. The cases `gpu`
and `fsdp2` are plain torch's: DeepSpeed is not imported for them, and FSDP2's model is made on the
host, whence it is taken in parts. With `--turns` the program waits for its turn before each step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_process import resident
from gpu_turns import Turns

_TORCH_CASES = ("gpu", "fsdp2")
_BUILT_ELSEWHERE = ("nvme_param", "fsdp2")
"""There it is the peer that says where modules are built."""
_WAITS_OF_A_STEP = 4
"""A program waits for the device before each step and after each of its three phases."""


def run(program: str, arguments: list[str], turns: Turns | None) -> dict[str, Any]:
    """Run a program and return what its last line says, with the baseline of its process."""
    case = arguments[0]
    needed = ["transformers"] if case in _TORCH_CASES else ["deepspeed", "transformers"]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise SystemExit(
                f"gpu_peer: case {case} needs the package {name}, which is not installed: pip"
                f" install {name}, in an environment that has tierzero as well"
            )
    importlib.import_module(needed[0])  # only its memory counts
    import torch

    importlib.import_module("transformers.models.llama.modeling_llama")

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        if case not in _BUILT_ELSEWHERE:
            build_on_device("cuda")
    baseline = resident()["VmRSS"]
    taken = wait_for_turns(turns, program, baseline)
    sys.argv = [program, *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(program, run_name="__main__")
    found = result_of(output.getvalue())
    if found is None:
        raise SystemExit(f"{program} printed no line of JSON with its rows")
    if (turn_count := taken()) != len(found["rows"]):
        raise SystemExit(
            f"{program} has {len(found['rows'])} rows, but {turn_count} steps began: it must"
            f" call torch.cuda.synchronize {_WAITS_OF_A_STEP} times a step, and not elsewhere"
        )
    return {**found, "baseline_bytes": baseline}


def result_of(output: str) -> dict[str, Any] | None:
    """Return what a program has found: the last line that is JSON with rows, or None.

    Libraries may print lines behind it.
    """
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("rows"), list):
                return found
    return None


def wait_for_turns(turns: Turns | None, program: str, baseline: int) -> Callable[[], int]:
    """Let a program wait for its turn, if it has any, where it waits for the device before a step.

    Returns:
        A call that tells how many steps it has begun.
    """
    import torch

    plain: Any = torch.cuda.synchronize
    has_device = torch.cuda.is_available()
    calls = 0

    @functools.wraps(plain)
    def synchronize(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        # Libraries synchronize as well: only what the program itself asks for tells its steps.
        if sys._getframe(1).f_globals.get("__file__") == program:
            if turns is not None and calls % _WAITS_OF_A_STEP == 0:
                turns.wait(**memory(baseline))
            calls += 1
        if has_device:
            plain(*args, **kwargs)

    torch.cuda.synchronize = synchronize
    return lambda: -(-calls // _WAITS_OF_A_STEP)


def memory(baseline: int) -> dict[str, float]:
    """Return what the process has taken so far, in the words of the program's last line."""
    import torch

    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "gpu_peak_gb": round(device / 1e9, 2),
        "rss_peak_gb": round(resident()["VmHWM"] / 1e9, 2),
        "baseline_bytes": baseline,
    }


def build_on_device(device: str) -> None:
    """Let models be built on a device, from here on."""
    import torch

    model: Any = importlib.import_module("transformers").LlamaForCausalLM
    plain = model.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device(device):
            plain(self, *args, **kwargs)

    model.__init__ = initialise


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=Turns.of, help="two file descriptors, from gpu_turns.py")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="CASE [ARGUMENT ...]")
    options = parser.parse_args()
    if not options.arguments:
        parser.error("name a case of the program")
    print(json.dumps(run(options.program, options.arguments, options.turns)))


if __name__ == "__main__":
    main()
