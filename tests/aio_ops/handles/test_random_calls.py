"""Random calls of one handle, synchronous and not, against bytes in memory."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aio_ops.handles import aio_handle
from tests.aio_ops.handles.support import as_tensor, bytes_of, make
from tests.aio_ops.support import make_engine, pattern

FILE_COUNT = 3
START_BYTES = 200_000


class Call(NamedTuple):
    writes: bool
    later: bool
    validate: bool
    kind: str
    file: int
    offset: int
    size_bytes: int


offsets = st.one_of(st.integers(0, 120_000), st.sampled_from([0, 512, 4096, 65536]))
sizes = st.one_of(st.integers(0, 300_000), st.sampled_from([512, 4096, 65536, 131072]))
calls = st.builds(
    Call,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["locked", "unlocked", "strided"]),
    st.integers(0, FILE_COUNT - 1),
    offsets,
    sizes,
)


class Session:
    """One handle on a few files, and what the files and the tensors must hold."""

    def __init__(self, directory: Path, engine: str) -> None:
        self.handle = aio_handle(16384, 4, False, True, 2, engine=engine)
        self.oracles = [bytearray(pattern(seed, START_BYTES)) for seed in range(FILE_COUNT)]
        self.paths = [directory / f"file-{index}" for index in range(FILE_COUNT)]
        for path, oracle in zip(self.paths, self.oracles, strict=True):
            path.write_bytes(oracle)
        self.pending: dict[int, tuple[torch.Tensor, bytes]] = {}

    def act(self, seed: int, call: Call) -> None:
        if call.file in self.pending:  # nothing is ordered between calls on one file
            self.settle(self.handle.wait())
        oracle = self.oracles[call.file]
        size_bytes = call.size_bytes
        if call.writes:
            data = pattern(seed, size_bytes)
            missing = call.offset - len(oracle)
            if size_bytes:
                oracle.extend(bytes(max(0, missing)))
                oracle[call.offset : call.offset + size_bytes] = data
        else:
            size_bytes = min(size_bytes, len(oracle) - call.offset)
            data = bytes(size_bytes)
        tensor = self.tensor(call.kind, data)
        run = self.handle.pwrite if call.writes else self.handle.pread
        returned = run(tensor, self.paths[call.file], call.validate, call.later, call.offset)
        wanted = bytes(oracle[call.offset : call.offset + size_bytes])
        if call.later:
            assert returned == 0
            self.pending[call.file] = (tensor, wanted)
        else:
            assert bytes_of(tensor) == wanted
            self.settle(returned - 1)

    def tensor(self, kind: str, data: bytes) -> torch.Tensor:
        if kind == "strided":
            wide = torch.full((len(data), 3), 0x55, dtype=torch.uint8)
            wide[:, 1] = as_tensor(data) if data else torch.empty(0, dtype=torch.uint8)
            return wide[:, 1]
        if not data:
            return torch.empty(0, dtype=torch.uint8)
        return make(kind, self.handle, data)

    def settle(self, returned: int) -> None:
        assert returned == len(self.pending)
        for tensor, wanted in self.pending.values():
            assert bytes_of(tensor) == wanted
        self.pending.clear()

    def finish(self) -> None:
        self.settle(self.handle.wait())
        self.handle.close()
        for path, oracle in zip(self.paths, self.oracles, strict=True):
            assert path.read_bytes() == oracle


def run(directory: Path, engine: str, work: list[Call]) -> None:
    session = Session(directory, engine)
    for seed, call in enumerate(work):
        session.act(seed, call)
    session.finish()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=st.lists(calls, min_size=1, max_size=12))
def test_random_calls_equal_plain_bytes(scratch: Path, work: list[Call]) -> None:
    run(scratch, "auto", work)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["io_uring", "kernel_aio", "threads", "python"])
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=st.lists(calls, min_size=1, max_size=30))
def test_many_random_calls_equal_plain_bytes(scratch: Path, engine: str, work: list[Call]) -> None:
    make_engine(engine).close()  # or skip with the reason
    run(scratch, engine, work)
