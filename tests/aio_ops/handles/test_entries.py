"""How users come by a handle, and how the programs that tune and measure use it."""

import logging
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aio_ops.handles as module
from aio_ops.handles import AsyncIOBuilder, GDSBuilder, PinMemoryBuilder, gds_handle
from tests.aio_ops.disks import storage_bytes
from tests.aio_ops.handles.support import BYTES, MIB, bytes_of, file_of, unlocked
from tests.conftest import ROOT


def test_the_builders_give_the_names_of_the_field() -> None:
    for name in ("aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"):
        assert hasattr(AsyncIOBuilder().load(), name)
    assert GDSBuilder().load(verbose=False).gds_handle is gds_handle
    assert PinMemoryBuilder().load().pin_handle().is_pinned(torch.zeros(1)) is False
    assert AsyncIOBuilder().is_compatible() is True
    assert PinMemoryBuilder().is_compatible(verbose=True) is True
    assert [builder.NAME for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder)] == [
        "async_io",
        "gds",
        "pin_memory",
    ]


def test_the_gds_builder_says_whether_there_is_a_driver(caplog: pytest.LogCaptureFixture) -> None:
    compatible = GDSBuilder().is_compatible(verbose=True)
    assert compatible is ("gds is not compatible: there is no CUDA driver" not in caplog.text)
    if torch.cuda.is_available():
        assert compatible


def test_a_gds_handle_reports_that_gds_is_not_in_use(caplog: pytest.LogCaptureFixture) -> None:
    from aio_ops.handles import gds

    gds._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        handle = gds_handle(1 << 20, 16, False, True, 4)
        gds_handle()
    assert caplog.text.count("GPUDirect Storage is not in use") == 1
    assert handle.gds_in_use is False
    assert "bounce slots" in handle.gds_reason
    assert (handle.get_alignment(), handle.get_intra_op_parallelism()) == (512, 4)


def test_a_gds_handle_moves_host_tensors_and_refuses_to_pin_them(scratch: Path) -> None:
    handle = gds_handle()
    path, data = file_of(scratch, 1, MIB)
    target = handle.new_cpu_locked_tensor(MIB, BYTES)
    returned = handle.sync_pread(target, path)
    assert returned == 1
    assert bytes_of(target) == data
    assert handle.is_pinned(target[5:])
    for call in (handle.pin_device_tensor, handle.unpin_device_tensor):
        with pytest.raises(ValueError, match="is not on a device"):
            call(target)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="finds no CUDA device"):
            handle.new_pinned_device_tensor(10, BYTES)


def test_importing_the_handles_imports_no_array_library() -> None:
    program = (
        "import sys, aio_ops.handles\n"
        "found = [name for name in ('torch', 'numpy') if name in sys.modules]\n"
        "raise SystemExit(', '.join(found) or 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_example_of_the_docs_prints_what_it_says(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "handles.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    said = code.rpartition("print(")[2].partition("  # ")[2].partition("\n")[0]
    exec(code.replace("/tmp/", f"{scratch}/"), {})
    assert capsys.readouterr().out.strip() == said == "1 1"


class Bench:
    """Uses a module of the field's shape as programs that measure it do."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.allocator = module.aio_handle(1 << 20, 8, False, True, 1)
        self.buffers: dict[int, torch.Tensor] = {}

    def tensor(self, size_bytes: int) -> torch.Tensor:
        if size_bytes not in self.buffers:
            example = torch.empty(0, dtype=torch.uint8)
            tensor = self.allocator.new_cpu_locked_tensor(size_bytes, example)
            tensor.fill_(7)
            self.buffers[size_bytes] = tensor
        return self.buffers[size_bytes]

    def run(self, operation: str, path: str, size_bytes: int, settings: tuple[int, ...]) -> int:
        block_size, queue_depth, threads = settings
        handle = self.module.aio_handle(block_size, queue_depth, False, True, threads)
        call = handle.sync_pread if operation == "read" else handle.sync_pwrite
        moved_bytes = 0
        for _ in range(3):
            returned = call(self.tensor(size_bytes), path)
            if returned < 0:
                raise RuntimeError(f"{operation} returned {returned}")
            moved_bytes += size_bytes
        return moved_bytes

    def release(self) -> list[bool]:
        freed = [self.allocator.free_cpu_locked_tensor(tensor) for tensor in self.buffers.values()]
        self.buffers.clear()
        return freed


@pytest.mark.parametrize("get", [lambda: module, lambda: AsyncIOBuilder().load()])
def test_a_program_that_measures_gets_what_it_counts_on(scratch: Path, get: Any) -> None:
    bench = Bench(get())
    size_bytes = 2 * MIB
    path, data = file_of(scratch, 2, size_bytes)
    for settings in ((MIB, 32, 1), (8 * MIB, 128, 4), (4096, 2, 3)):
        before = storage_bytes()
        read = bench.run("read", str(path), size_bytes, settings)
        assert storage_bytes()[0] - before[0] == read == 3 * size_bytes
        assert bytes_of(bench.tensor(size_bytes)) == data
        before = storage_bytes()
        written = bench.run("write", str(path), size_bytes, settings)
        assert storage_bytes()[1] - before[1] == written == 3 * size_bytes
    assert bench.release() == [True]


def test_a_swapper_of_the_fields_kind(scratch: Path) -> None:
    """Several states of a sub-group are submitted in a loop and counted by one wait."""
    reader, writer = module.aio_handle(MIB, 16), module.aio_handle(MIB, 16)
    count, numel = 3, 64 * 1024
    pool = reader.new_cpu_locked_tensor(count * numel, torch.empty(0))
    buffers = [pool.narrow(0, index * numel, numel) for index in range(count)]
    assert all(reader.is_pinned(buffer) for buffer in buffers)
    paths = [str(scratch / f"{name}.tensor.swp") for name in ("fp32", "exp_avg", "exp_avg_sq")]
    for buffer in buffers:
        buffer.zero_()
    for step in range(4):
        for buffer, path in zip(buffers, paths, strict=True):
            returned = writer.async_pwrite(buffer, path, 0)
            assert returned == 0
        returned = writer.wait()
        assert returned == count
        pool.fill_(-1)
        for buffer, path in zip(buffers, paths, strict=True):
            returned = reader.async_pread(buffer, path, 0)
            assert returned == 0
        returned = reader.wait()
        assert returned == count
        assert statistics.fmean(pool.tolist()) == step
        pool.add_(1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["aio_handle", "gds_handle"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_device_tensors(scratch: Path, name: str, dtype: torch.dtype) -> None:
    handle = getattr(module, name)(256 * 1024, 16, False, True, 2)
    numel = 9 * MIB + 3
    source = torch.randn(numel, device="cuda").to(dtype)
    wanted = source.clone()
    torch.cuda.synchronize()
    path = scratch / "device"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # what is written is what the current stream leaves
        source.add_(1)
        returned = handle.async_pwrite(source, path)
        assert returned == 0
        source.zero_()  # the call has copied it
        returned = handle.wait()
        assert returned == 1
    assert path.read_bytes() == bytes_of((wanted + 1).cpu())
    target = torch.zeros(numel, dtype=dtype, device="cuda")
    returned = handle.async_pread(target, path)
    assert returned == 0
    returned = handle.wait()
    assert returned == 1
    assert torch.equal(target, wanted + 1)
    strided = torch.zeros(numel - 3, 2, dtype=dtype, device="cuda")[:, 0]
    returned = handle.pread(strided, path, True, False, 3 * wanted.element_size())
    assert returned == 1
    assert torch.equal(strided, (wanted + 1)[3:])
    returned = handle.pwrite(strided, path, True, False, 5)
    assert returned == 1


@pytest.mark.gpu
def test_device_tensors_are_pinned_by_exact_range(scratch: Path) -> None:
    handle = gds_handle()
    pinned = handle.new_pinned_device_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert (pinned.device.type, pinned.dtype, pinned.numel()) == ("cuda", torch.bfloat16, 1000)
    other = torch.zeros(4096, device="cuda")
    assert handle.is_pinned(pinned[10:20])
    assert not handle.is_pinned(other)
    returned = handle.pin_device_tensor(other)
    assert returned is True
    assert handle.is_pinned(other[1:])
    returned = handle.unpin_device_tensor(other)
    assert returned is True
    with pytest.raises(ValueError, match="was not pinned with this handle"):
        handle.unpin_device_tensor(other)
    returned = handle.free_pinned_device_tensor(pinned)
    assert returned is True
    assert not handle.is_pinned(pinned)
    host = unlocked(bytes(100))
    assert not handle.is_pinned(host)
