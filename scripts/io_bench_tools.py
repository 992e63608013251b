"""Whom io_bench.py measures, each in its own process: our engines, fio, DeepSpeed's aio_handle."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

IN_FLIGHT_BYTES = 32 << 20
BURST_BYTES = 64 << 20
LARGE_BYTES = 4 << 20  # what records are compared with
FIO_WORKLOADS = {"read": "read", "write": "write", "mixed": "rw"}
RECORDS = {"records-read": "read", "records-write": "write"}
LARGE = "/large"


@dataclass(frozen=True)
class Case:
    """What is measured."""

    workload: str
    transfer_bytes: int
    hugepages: bool


@dataclass(frozen=True)
class Target:
    """Where it is measured: a file, and a directory with a small file for every record."""

    file: Path
    small_files: Path
    moved_bytes: int


class Peer:
    """An interpreter that has DeepSpeed, or a module with an aio_handle, and what to try there.

    Each setting is (bytes of a block, queue depth, threads), and has a process that stays.
    """

    def __init__(self, python: str, module: str, settings: list[tuple[int, int, int]]) -> None:
        self._command = [python, str(Path(__file__).with_name("io_bench_peer.py")), module]
        self._settings = {
            f"{module}-{block >> 20}M-{depth}-{threads}": (block, depth, threads)
            for block, depth, threads in settings
        }
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def names(self) -> list[str]:
        """Return a contender's name for each setting."""
        return list(self._settings)

    def run(self, name: str, request: dict[str, object]) -> float:
        """Run what is asked for and return its CPU seconds."""
        if name not in self._processes:
            command = [*self._command, *(str(number) for number in self._settings[name])]
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = self._processes[name]
        if process.stdin is None or process.stdout is None:
            raise SystemExit(f"{name} has no input or output")
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith('{"cpu_s"'):
                return float(json.loads(line)["cpu_s"])
        raise SystemExit(f"{name} ended with {process.wait()}")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
            process.wait()


def transparent_hugepages() -> str:
    """Return what the kernel says about transparent huge pages."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return pages.read_text(encoding="ascii").strip() if pages.exists() else ""


def in_flight(transfer_bytes: int, *, alternates: bool) -> int:
    """Return how many transfers are under way at once; bursts need two of them in memory."""
    wanted_bytes = 2 * BURST_BYTES if alternates else IN_FLIGHT_BYTES
    return max(2, wanted_bytes // transfer_bytes)


def contenders(case: Case, engines: list[str], peer: Peer | None) -> list[str]:
    """Return who can run a case here."""
    names = list(engines)
    if case.workload in RECORDS:
        names += [engine + LARGE for engine in engines]
    fio_has_it = case.workload in FIO_WORKLOADS or case.workload in RECORDS
    fio_pages = not case.hugepages or "[always]" in transparent_hugepages()
    if shutil.which("fio") and fio_has_it and fio_pages:
        names += ["fio-io_uring", "fio-libaio"]
    if peer is not None and case.workload != "alternating":
        names += peer.names()  # its memory is on small pages, whatever one asks for
    return names


def run(name: str, target: Target, case: Case, peer: Peer | None) -> float:
    """Run a contender and return its CPU seconds."""
    if name.startswith("fio-"):
        return _run_fio(name, target, case)
    if peer is not None and name in peer.names():
        return _run_peer(peer, name, target, case)
    return _run_engine(name, target, case)


def _output_of(command: list[str]) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def _run_engine(name: str, target: Target, case: Case) -> float:
    size_bytes = LARGE_BYTES if name.endswith(LARGE) else case.transfer_bytes
    alternates = case.workload == "alternating"
    workload = RECORDS.get(case.workload, "mixed" if alternates else case.workload)
    command = [
        sys.executable,
        str(Path(__file__).with_name("io_bench_run.py")),
        *(name.removesuffix(LARGE), str(target.file), workload, str(target.moved_bytes)),
        *(str(size_bytes), str(in_flight(size_bytes, alternates=alternates))),
        *(["--burst-bytes", str(BURST_BYTES)] if alternates else []),
        *(["--hugepages"] if case.hugepages else []),
    ]
    return float(json.loads(_output_of(command))["cpu_s"])


def _run_fio(name: str, target: Target, case: Case) -> float:
    command = [
        *("fio", "--name=bench", "--direct=1", "--output-format=json", "--randrepeat=1"),
        f"--ioengine={name.removeprefix('fio-')}",
        f"--filename={target.file}",
        f"--rw={FIO_WORKLOADS[RECORDS.get(case.workload, case.workload)]}",
        f"--bs={case.transfer_bytes}",
        f"--iodepth={in_flight(case.transfer_bytes, alternates=False)}",
        f"--size={target.moved_bytes}",
        "--scramble_buffers=0",
        f"--mem={'mmap' if case.hugepages else 'malloc'}",
    ]
    output = _output_of(command)
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)


def _run_peer(peer: Peer, name: str, target: Target, case: Case) -> float:
    path = target.small_files if case.workload in RECORDS else target.file
    request = {
        "path": str(path),
        "workload": RECORDS.get(case.workload, case.workload),
        "moved_bytes": target.moved_bytes,
        "transfer_bytes": case.transfer_bytes,
        "in_flight": in_flight(case.transfer_bytes, alternates=False),
    }
    return peer.run(name, request)


def prepare(target: Target, record_bytes: int | None) -> None:
    """Write the file, and with `record_bytes` the small files, so that reads reach the disk."""
    block = os.urandom(1 << 20)
    with target.file.open("wb") as file:
        for _ in range(target.moved_bytes >> 20):
            file.write(block)
        os.fsync(file.fileno())
    if record_bytes is not None:
        target.small_files.mkdir()
        for index in range(target.moved_bytes // record_bytes):
            (target.small_files / f"{index:06}").write_bytes(block[:record_bytes])
        os.sync()


def clean(target: Target) -> None:
    """Remove what was prepared."""
    target.file.unlink(missing_ok=True)
    shutil.rmtree(target.small_files, ignore_errors=True)
