"""Tensors of every kind as sources and targets, and what cannot be one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aio_ops.handles import AioHandle, deepspeed_memcpy
from aio_ops.handles.tensors import DeviceBytes, bytes_array
from aio_ops.memory import HostArena
from tests.aio_ops.handles.support import MIB, as_tensor, bytes_of, file_of, unlocked
from tests.aio_ops.support import pattern


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.complex64]
)
def test_types_and_shapes(handle: AioHandle, scratch: Path, dtype: torch.dtype) -> None:
    source = torch.randn(17, 5, 3).to(dtype)
    target = torch.zeros_like(source)
    path = str(scratch / "new")
    handle.sync_pwrite(source, path)
    handle.sync_pread(target, path)
    assert torch.equal(source, target)
    assert Path(path).stat().st_size == source.numel() * source.element_size()


def test_arrays_of_other_libraries_come_in_through_dlpack(handle: AioHandle, scratch: Path) -> None:
    path, data = file_of(scratch, 1, 60 * 4096)
    target = np.zeros((60, 1024), np.int32)
    handle.async_pread(target, str(path))
    handle.wait()
    assert target.tobytes() == data
    handle.sync_pwrite(target[10:20], scratch / "part")
    assert (scratch / "part").read_bytes() == data[10 * 4096 : 20 * 4096]

    class Exported:
        """No library: only what DLPack asks for."""

        def __dlpack__(self, **_: object) -> object:
            return target.__dlpack__()

    target[:] = 0
    handle.sync_pread(Exported(), str(path))
    assert target.tobytes() == data
    with pytest.raises(ValueError, match=r"shape \(60, 512\) is not in one piece"):
        handle.sync_pread(target[:, ::2], str(path))
    frozen = np.zeros(4)
    frozen.setflags(write=False)
    with pytest.raises(ValueError, match="gives its memory to no one"):
        handle.sync_pread(frozen, str(path))


def test_what_is_no_tensor_is_refused(handle: AioHandle, scratch: Path) -> None:
    path, _ = file_of(scratch, 2, 4096)
    no_tensor: list[Any] = [bytearray(10), None, 5]
    for wrong in no_tensor:
        with pytest.raises(TypeError, match="is no tensor: it has no __dlpack__"):
            handle.sync_pread(wrong, str(path))
    with pytest.raises(ValueError, match="file_offset must not be negative, got -1"):
        handle.sync_pread(torch.zeros(4), str(path), -1)
    with pytest.raises(ValueError, match="file_offset must not be negative, got -1"):
        handle.sync_pwrite(torch.zeros(4), str(path), -1)
    with pytest.raises(ValueError, match="no regular file and no disk"):
        handle.sync_pwrite(torch.zeros(4), "/dev/null")


def test_an_empty_tensor_moves_nothing_and_counts(handle: AioHandle, scratch: Path) -> None:
    empty = torch.empty(0)
    returned = handle.sync_pwrite(empty, scratch / "empty")
    assert returned == 1
    assert (scratch / "empty").stat().st_size == 0
    returned = handle.async_pread(empty, scratch / "empty")
    assert returned == 0
    returned = handle.wait()
    assert returned == 1


def test_parameters_and_lazy_views_mean_what_they_show(handle: AioHandle, scratch: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    wanted = torch.randn(8, 8)
    handle.sync_pwrite(wanted, scratch / "weights")
    handle.sync_pread(parameter, scratch / "weights")
    assert torch.equal(parameter, wanted)
    handle.sync_pread(parameter.t(), scratch / "weights")
    assert torch.equal(parameter.t(), wanted)
    lazy = torch.randn(5, dtype=torch.complex64).conj()
    assert lazy.is_conj()
    handle.sync_pwrite(lazy, scratch / "lazy")
    read = torch.zeros(5, dtype=torch.complex64)
    handle.sync_pread(read, scratch / "lazy")
    assert torch.equal(read, lazy)
    with pytest.raises(ValueError, match="lazily conjugated or negated"):
        handle.sync_pread(lazy, scratch / "lazy")


def test_a_tensor_may_be_dropped_or_get_other_data_at_once(
    handle: AioHandle, scratch: Path
) -> None:
    data = pattern(3, 4 * MIB)
    for index in range(4):
        tensor = as_tensor(data)
        handle.async_pwrite(tensor, scratch / str(index))
        tensor.data = torch.zeros(1)
        del tensor
    returned = handle.wait()
    assert returned == 4
    assert all((scratch / str(index)).read_bytes() == data for index in range(4))


def test_what_only_its_library_reaches_is_copied_by_its_verbs() -> None:
    tensor = as_tensor(pattern(4, 10000))
    memory = DeviceBytes(tensor, torch)
    with HostArena(4096) as arena:
        span = arena.carve(3000)
        memory.load(1000, span)
        assert bytes(span.view()) == bytes_of(tensor[1000:4000])
        span.view()[:] = pattern(5, 3000)
        memory.store(7000, span)
    assert bytes_of(tensor) == pattern(4, 10000)[:7000] + pattern(5, 3000)
    assert memory.size_bytes == 10000


def test_arrays_over_memory_keep_it() -> None:
    with HostArena(2 * MIB) as arena:
        array = bytes_array(arena.carve(MIB), torch)
    array.fill_(6)
    assert set(bytes_of(array)) == {6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_memcpy_copies_every_byte_of_any_type_and_shape(dtype: torch.dtype) -> None:
    source = torch.randn(30, 7).to(dtype)
    target = torch.zeros(210, dtype=dtype)
    returned = deepspeed_memcpy(target, source)
    assert returned == 0
    assert torch.equal(target, source.reshape(-1))
    strided = torch.zeros(30, 14, dtype=dtype)[:, ::2]
    returned = deepspeed_memcpy(dest=strided, src=source)
    assert returned == 0
    assert torch.equal(strided, source)
    with pytest.raises(ValueError, match="they must be the same"):
        deepspeed_memcpy(target[1:], source)


def test_validation_of_what_is_not_in_one_piece(handle: AioHandle, scratch: Path) -> None:
    source = unlocked(pattern(6, 128 * 128)).reshape(128, 128).t()
    returned = handle.pwrite(source, scratch / "turned", True, False)
    assert returned == 1
    target = torch.zeros(128, 256, dtype=torch.uint8)[:, ::2]
    returned = handle.pread(target, scratch / "turned", True, False)
    assert returned == 1
    assert torch.equal(target, source)
