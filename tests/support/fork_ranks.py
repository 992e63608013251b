"""Ranks that are forked from the test itself: no interpreter and no torch to load again."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[int], Any]
"""Gets the rank and returns something that JSON can hold."""


def start_ranks(work: Work, world_size: int, folder: Path) -> list[int]:
    """Fork `world_size` ranks (one needs no process group), and return their process ids.

    The thread of their store starts after the last fork: no rank is the copy of a busy process.
    """
    told = Path(tempfile.mkdtemp(dir=folder))
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    port: int = listening.getsockname()[1]
    found = []
    for rank in range(world_size):
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forking with threads: these are idle
            process = os.fork()
        if process == 0:
            listening.close()
            _run(work, rank, (world_size, port), told)
        found.append(process)
    _FOLDERS[found[0]] = told
    _STORES[found[0]] = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return found


def wait_for(processes: list[int], timeout_s: float = 120) -> list[Any]:
    """Wait for ranks and return what each returned; a rank that failed fails the test."""
    codes = reap(processes, timeout_s)
    told = _FOLDERS.pop(processes[0])
    found = []
    for rank, code in enumerate(codes):
        path = told / f"rank{rank}"
        said = json.loads(path.read_text()) if path.exists() else {"error": f"exit code {code}"}
        assert "error" not in said, f"rank {rank}: {said['error']}"
        found.append(said["result"])
    return found


def reap(processes: list[int], timeout_s: float = 120) -> list[int]:
    """Wait until processes are gone and return their exit codes; late ones are killed."""
    codes = []
    end = time.monotonic() + timeout_s
    for process in processes:
        ended = os.pidfd_open(process)
        if not select.select([ended], [], [], max(end - time.monotonic(), 0.0))[0]:
            os.kill(process, signal.SIGKILL)
        os.close(ended)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    _STORES.pop(processes[0], None)
    return codes


def on_ranks(work: Work, world_size: int, folder: Path, timeout_s: float = 120) -> list[Any]:
    """Run a function on forked ranks and return what each returned."""
    return wait_for(start_ranks(work, world_size, folder), timeout_s)


_FOLDERS: dict[int, Path] = {}
"""Where the ranks of a job say what came of them, by the id of its first one."""

_STORES: dict[int, dist.TCPStore] = {}
"""Through which they find each other, likewise."""


def _run(work: Work, rank: int, job: tuple[int, int], told: Path) -> None:
    world_size, port = job
    code = 1
    try:
        os.environ.pop("RANK", None)
        torch.set_num_threads(1)
        if world_size > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        said: dict[str, Any] = {"result": work(rank)}
        code = 0
    except BaseException:  # noqa: BLE001  told to the test
        said = {"error": traceback.format_exc()}
    try:
        temporary = told / f".rank{rank}"
        temporary.write_text(json.dumps(said))
        temporary.rename(told / f"rank{rank}")
    finally:
        os._exit(code)
