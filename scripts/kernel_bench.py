"""Measure AdamW in each format beside a copy of memory, by turns: table and JSON.

    python scripts/kernel_bench.py --json kernels.json

On the host the native kernels run on the threads that a single rank would use, beside torch's
multi-threaded copy, torch's fused AdamW and, with `--peer PYTHON`, DeepSpeed's CPU Adam in an
interpreter that has it: a process of its own, which steps when its turn comes. On a GPU the device
kernels run beside a copy within the device. Rates count the bytes that must be read and written:
parameter, gradient and state; a copy counts both sides. A copy on the host also reads the lines
that it is about to write, which nobody counts; a pass in place does not, nor does an update, so
both can be faster than the copy. The row "in place" is such a pass, torch's negation. Arrays that
fit in the processor's caches tell of the caches: leave `--numel` as large as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from estimators import ElementType, StateFormat, record_layout
from estimators.command import output_option
from offload import (
    AdamWScalars,
    DeviceKernels,
    Kernels,
    RoundingKey,
    StateArrays,
    load_device_kernels,
    load_kernels,
    state_tensors,
)
from zero.machine import thread_count

HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
}
KEY = RoundingKey.derive(0, 1, "benchmark", 0)
REST_SECONDS = 0.1
"""Before a turn on the host. The threads of torch's OpenMP wait actively for the next loop, for
some ten milliseconds; a kernel on threads of its own would share the cores with them."""
CASES = {
    "fp32 parameters": (ElementType.FP32, StateFormat.FP32),
    "fp32": (ElementType.BF16, StateFormat.FP32),
    "exact": (ElementType.BF16, StateFormat.EXACT),
    "bf16": (ElementType.BF16, StateFormat.BF16),
    "compact": (ElementType.BF16, StateFormat.COMPACT),
}


@dataclass(frozen=True, slots=True)
class Try:
    """Something to time: what one run touches, and of how many parameters."""

    run: Callable[[], float]
    touched_bytes: int
    numel: int


def touched_bytes(element: ElementType, state_format: StateFormat, numel: int) -> int:
    """Return the bytes that an update reads and writes; beside a whole master a parameter of 16
    bits is only written."""
    state = record_layout(state_format, element, numel).size_bytes
    param = numel * element.size_bytes
    reads_param = element is ElementType.FP32 or state_format is not StateFormat.FP32
    gradient = param
    return gradient + (2 if reads_param else 1) * param + 2 * state


def operands(
    element: ElementType, state_format: StateFormat, numel: int, device: str
) -> tuple[Tensor, Tensor, StateArrays]:
    """Return parameter, gradient and state with ordinary values."""
    dtype = torch.float32 if element is ElementType.FP32 else torch.bfloat16
    param = torch.randn(numel, device=device).mul_(0.02).to(dtype)
    grad = torch.randn(numel, device=device).mul_(1e-3).to(dtype)
    layout = record_layout(state_format, element, numel)
    record = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
    return param, grad, state_tensors(layout, record)


def as_array(tensor: Tensor | None) -> Any:
    """Return the memory of a tensor as an array, bf16 as its bits."""
    if tensor is None:
        return None
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def scalars() -> AdamWScalars:
    """Return the scalars of a late step."""
    return AdamWScalars.from_hyperparameters(step=100, grad_scale=0.5, **HYPERPARAMETERS)


def on_host(kernels: Kernels, name: str, numel: int) -> Try:
    """Return the native kernel of a format."""
    element, state_format = CASES[name]
    param, grad, state = operands(element, state_format, numel, "cpu")
    arrays = StateArrays(
        *(
            as_array(each)
            for each in (
                state.exp_avg,
                state.exp_avg_sq,
                state.master,
                state.residual,
                state.exp_avg_base,
                state.exp_avg_sq_base,
            )
        )
    )
    key = KEY if state_format.is_lossy else None

    def run() -> float:
        start = time.perf_counter()
        kernels.update(as_array(param), as_array(grad), arrays, scalars(), key)
        return time.perf_counter() - start

    return Try(run, touched_bytes(element, state_format, numel), numel)


def host_copy(size_bytes: int) -> Try:
    """Return torch's copy, on its threads."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))

    def run() -> float:
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start

    return Try(run, 2 * size_bytes, 0)


def host_in_place(size_bytes: int) -> Try:
    """Return torch's negation in place: it reads and writes the same lines, as an update does."""
    values = torch.zeros(size_bytes // 4)

    def run() -> float:
        start = time.perf_counter()
        values.neg_()
        return time.perf_counter() - start

    return Try(run, 2 * size_bytes, 0)


def torch_fused(numel: int) -> Try:
    """Return torch's fused AdamW on fp32 parameters."""
    parameter = torch.nn.Parameter(torch.randn(numel).mul_(0.02))
    parameter.grad = torch.randn(numel).mul_(1e-3)
    optimizer = torch.optim.AdamW([parameter], fused=True, lr=1e-3)

    def run() -> float:
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return Try(run, touched_bytes(ElementType.FP32, StateFormat.FP32, numel), numel)


class Peer:
    """DeepSpeed's CPU Adam on fp32 parameters, in an interpreter that has it."""

    def __init__(self, interpreter: str, numel: int, threads: int) -> None:
        program = Path(__file__).with_name("kernel_bench_peer.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if Path(interpreter).resolve() != Path(sys.executable).resolve():
            environment.pop("PYTHONPATH", None)
            # Operators are built by programs that lie beside the interpreter.
            own = str(Path(interpreter).absolute().parent)
            environment["PATH"] = f"{own}{os.pathsep}{environment.get('PATH', '')}"
        self.numel = numel
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed in close
        self._process = subprocess.Popen(
            [interpreter, str(program), str(numel), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return the next line that is JSON: the operator's build prints others.

        Raises:
            RuntimeError: with the end of what the peer wrote, if it ended.
        """
        output = self._process.stdout
        for line in output or ():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        code = self._process.wait()
        self._said.seek(0)
        raise RuntimeError(f"the peer ended with {code}: {self._said.read().strip()[-600:]}")

    def tried(self) -> Try:
        """Return a step as something to time."""
        size_bytes = touched_bytes(ElementType.FP32, StateFormat.FP32, self.numel)
        return Try(self._step, size_bytes, self.numel)

    def _step(self) -> float:
        if self._process.stdin is None:
            raise RuntimeError("the peer has no input")
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """Let the peer end."""
        self._process.communicate()
        self._said.close()


def timed_on_device(work: Callable[[], object]) -> float:
    """Return the seconds that work takes on the current stream."""
    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def on_device(kernels: DeviceKernels, name: str, numel: int) -> Try:
    """Return the device kernel of a format."""
    element, state_format = CASES[name]
    param, grad, state = operands(element, state_format, numel, "cuda")
    key = KEY if state_format.is_lossy else None
    update = partial(kernels.update, param, grad, state, scalars(), key)
    size_bytes = touched_bytes(element, state_format, numel)
    return Try(partial(timed_on_device, update), size_bytes, numel)


def device_copy(size_bytes: int) -> Try:
    """Return a copy within the device."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return Try(partial(timed_on_device, partial(target.copy_, source)), 2 * size_bytes, 0)


def by_turns(
    tries: dict[str, Try], rounds: int, rest_seconds: float = 0.0
) -> dict[str, dict[str, float]]:
    """Time each `rounds` times, each round starting with another; return medians and spreads."""
    seconds: dict[str, list[float]] = {name: [] for name in tries}
    for each in tries.values():
        each.run()  # compiles, and touches every page
    names = list(tries)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(rest_seconds)
            seconds[name].append(tries[name].run())
    found = {}
    for name, each in tries.items():
        rates = sorted(each.touched_bytes / second for second in seconds[name])
        found[name] = {
            "bytes_per_s": statistics.median(rates),
            "least": rates[0],
            "greatest": rates[-1],
            "parameters_per_s": each.numel / statistics.median(seconds[name]),
        }
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what there is; return plain data."""
    threads = options.threads or thread_count(1)
    torch.set_num_threads(threads)
    kernels = load_kernels("native", thread_count=threads)
    tries = {"copy": host_copy(8 * options.numel), "in place": host_in_place(8 * options.numel)}
    tries.update({name: on_host(kernels, name, options.numel) for name in CASES})
    tries["torch fused AdamW"] = torch_fused(options.numel)
    notes = []
    peer = Peer(options.peer, options.numel, threads) if options.peer else None
    if peer is not None:
        tries["DeepSpeed CPU Adam"] = peer.tried()
        notes.append(f"peer: DeepSpeed {peer.versions['deepspeed']} on {peer.versions['torch']}")
    else:
        notes.append(
            "no peer: give --peer PYTHON, the interpreter of an environment with DeepSpeed"
        )
    results: dict[str, Any] = {
        "threads": threads,
        "torch": torch.__version__,
        "numel": options.numel,
        "host": by_turns(tries, options.rounds, REST_SECONDS),
    }
    if peer is not None:
        peer.close()
    del tries
    if torch.cuda.is_available():
        device_kernels = load_device_kernels(torch.device("cuda"))
        count = options.device_numel
        on_gpu = {"copy": device_copy(8 * count)}
        on_gpu.update({name: on_device(device_kernels, name, count) for name in CASES})
        results["device"] = by_turns(on_gpu, options.rounds)
        results["device_name"] = torch.cuda.get_device_name()
        results["device_kernels"] = device_kernels.name
        results["device_numel"] = count
    else:
        notes.append("no CUDA device: only the host is measured")
    return {**results, "notes": notes}


def show(results: dict[str, Any], console: Console) -> None:
    """Print one table for the host and one for the device."""
    for where in ("host", "device"):
        measured = results.get(where)
        if not isinstance(measured, dict):
            continue
        label = f"{results['threads']} threads" if where == "host" else results["device_name"]
        table = Table(title=f"AdamW, {where} ({label})", title_justify="left")
        for heading in ("what", "GB/s", "from", "to", "of the copy", "M parameters/s"):
            table.add_column(heading, justify="left" if heading == "what" else "right")
        copy = measured["copy"]["bytes_per_s"]
        for name, row in measured.items():
            rates = [f"{row[key] / 1e9:.1f}" for key in ("bytes_per_s", "least", "greatest")]
            count = row["parameters_per_s"] / 1e6
            parameters = f"{count:,.0f}" if count else ""
            table.add_row(name, *rates, f"{row['bytes_per_s'] / copy:.0%}", parameters)
        console.print(table)
    for note in results["notes"]:
        console.print(note)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--numel", type=int, default=1 << 26, help="elements on the host (default: %(default)s)")
    add("--device-numel", type=int, default=1 << 28, help="on a GPU (default: %(default)s)")
    add("--rounds", type=int, default=9, help="turns of each case (default: %(default)s)")
    add("--threads", type=int, help="by default those of a single rank")
    add("--peer", metavar="PYTHON", help="an interpreter that can import DeepSpeed")
    add("--json", type=output_option, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    results = measure(options)
    show(results, Console())
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
