"""Locked tensors: what is locked, what counts as pinned, and how long memory lives."""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from aio_ops.handles import PinHandle, aio_handle, pin_handle
from aio_ops.handles.locked import LockedMemory
from aio_ops.memory import align_up
from aio_ops.pinned import locked_bytes
from tests.aio_ops.handles.support import BYTES, MIB, bytes_of, file_of, in_child
from tests.aio_ops.test_memory import mapped_bytes, mapping_flags

ELEMENTS = 3 * MIB // 4 + 5


def test_exactly_its_pages_are_locked_on_memory_of_exactly_its_size() -> None:
    handle = aio_handle()
    before = locked_bytes()
    tensor = handle.new_cpu_locked_tensor(ELEMENTS, torch.empty(0, dtype=torch.float32))
    size_bytes = align_up(4 * ELEMENTS, mmap.PAGESIZE)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((ELEMENTS,), torch.float32, "cpu")
    assert not tensor.any()
    assert locked_bytes() - before == size_bytes
    assert tensor.data_ptr() % (2 << 20) == 0
    assert mapped_bytes(tensor.data_ptr()) == size_bytes
    flags = mapping_flags(tensor.data_ptr())
    assert flags is not None
    assert {"lo", "dc"} <= flags  # locked; not inherited by forked children
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    returned = handle.free_cpu_locked_tensor(tensor)
    assert returned is True
    assert locked_bytes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_the_type_is_that_of_the_example(dtype: torch.dtype) -> None:
    tensor = aio_handle().new_cpu_locked_tensor(10, torch.empty(3, dtype=dtype))
    assert (tensor.dtype, tensor.numel()) == (dtype, 10)


def test_the_library_is_that_of_the_example() -> None:
    class Special(torch.Tensor):
        pass

    handle = aio_handle()
    array = handle.new_cpu_locked_tensor(10, np.zeros(1, np.float64))
    assert isinstance(array, np.ndarray)
    assert (array.dtype, array.shape) == (np.float64, (10,))
    assert handle.is_pinned(array)
    returned = handle.free_cpu_locked_tensor(array)
    assert returned is True
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert type(handle.new_cpu_locked_tensor(10, parameter)) is torch.Tensor
    special = torch.zeros(1).as_subclass(Special)
    assert type(handle.new_cpu_locked_tensor(10, example_tenosr=special)) is torch.Tensor
    with pytest.raises(ValueError, match="an example of type list does not say"):
        handle.new_cpu_locked_tensor(10, [])
    with pytest.raises(ValueError, match="at least one element, got 0"):
        handle.new_cpu_locked_tensor(0, BYTES)


def test_views_and_slices_count_as_pinned_with_every_handle() -> None:
    first, second = aio_handle(), aio_handle()
    tensor = first.new_cpu_locked_tensor(8192, BYTES)
    for handle in (first, second, pin_handle()):
        assert handle.is_pinned(tensor)
        assert handle.is_pinned(tensor[1:])
        assert handle.is_pinned(tensor[100:200].view(10, 10))
        assert not handle.is_pinned(torch.zeros(8192))
        assert not handle.is_pinned(tensor.clone())
    returned = second.free_cpu_locked_tensor(tensor)
    assert returned is True
    assert not first.is_pinned(tensor)


def test_only_the_start_of_a_locked_tensor_can_be_freed_and_only_once() -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(100, BYTES)
    returned = handle.free_cpu_locked_tensor(tensor[1:])
    assert returned is False
    returned = handle.free_cpu_locked_tensor(torch.zeros(100))
    assert returned is False
    assert handle.is_pinned(tensor)
    returned = handle.free_cpu_locked_tensor(tensor[:10])
    assert returned is True  # it has the address of the start
    returned = handle.free_cpu_locked_tensor(tensor)
    assert returned is False


def test_views_outlive_a_free() -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(MIB, BYTES)
    view = tensor[4096:8192]
    address = tensor.data_ptr()
    view.fill_(9)
    returned = handle.free_cpu_locked_tensor(tensor)
    assert returned is True
    del tensor
    gc.collect()
    others = [handle.new_cpu_locked_tensor(MIB, BYTES) for _ in range(8)]
    for other in others:
        other.fill_(1)
    assert set(bytes_of(view)) == {9}
    assert mapped_bytes(address) > 0
    del view
    gc.collect()
    assert all(set(bytes_of(other)) == {1} for other in others)


def test_memory_is_given_back_with_its_last_view_although_nobody_freed_it() -> None:
    handle = aio_handle()
    before = locked_bytes()
    tensor = handle.new_cpu_locked_tensor(8 * MIB, BYTES)
    view = tensor.view(torch.int16)[:7]
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert handle.is_pinned(view)
    assert locked_bytes() - before == 8 * MIB
    del view
    gc.collect()
    assert locked_bytes() == before
    assert mapped_bytes(address) == 0


def test_making_and_freeing_leaves_no_trace() -> None:
    handle = aio_handle()
    before = locked_bytes()
    for size in range(1, 101):
        tensor = handle.new_cpu_locked_tensor(size * 4096, BYTES)
        if size % 2:
            returned = handle.free_cpu_locked_tensor(tensor)
            assert returned is True
    del tensor
    gc.collect()
    assert locked_bytes() == before


def test_the_table_finds_the_right_one_of_many() -> None:
    table = LockedMemory()
    spans = [table.allocate(4096 * (index % 3 + 1)) for index in range(60)]
    for index in range(0, 60, 2):
        assert table.free(spans[index].address)
    for index, span in enumerate(spans):
        assert table.covers(span.address + 1, span.size_bytes - 1) is bool(index % 2)
        assert not table.covers(span.address, span.size_bytes + 1)
    assert not table.covers(1, 1)
    gone = [span.address for span in spans]
    del spans, span
    gc.collect()
    assert not any(table.covers(address, 1) for address in gone)


def test_a_pin_handle_does_what_the_field_asks_of_it() -> None:
    handle = PinHandle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
    address = tensor.data_ptr()
    assert handle.is_pinned(tensor)
    returned = handle.free_cpu_locked_tensor_by_ptr(address + 2)
    assert returned is False
    returned = handle.free_cpu_locked_tensor_by_ptr(address)
    assert returned is True
    returned = handle.free_cpu_locked_tensor_by_ptr(address)
    assert returned is False
    other = handle.new_cpu_locked_tensor(num_elem=4, example_tensor=tensor)
    returned = handle.free_cpu_locked_tensor(locked_tensor=other)
    assert returned is True


def test_freeing_under_a_transfer_does_not_take_its_memory(scratch: Path) -> None:
    handle = aio_handle()
    path, data = file_of(scratch, 1, 8 * MIB)
    tensor = handle.new_cpu_locked_tensor(len(data), BYTES)
    handle.async_pread(tensor, str(path))
    returned = handle.free_cpu_locked_tensor(tensor)
    assert returned is True
    returned = handle.wait()
    assert returned == 1
    assert bytes_of(tensor) == data


def test_a_forked_child_ends_without_harm() -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(MIB, BYTES)
    tensor.fill_(3)

    def child() -> object:
        handle.free_cpu_locked_tensor(tensor)
        own = handle.new_cpu_locked_tensor(4096, BYTES)
        own.fill_(4)
        return set(bytes_of(own)), os.getpid() != parent

    parent = os.getpid()
    assert in_child(child) == "({4}, True)"
    assert set(bytes_of(tensor)) == {3}
    assert handle.is_pinned(tensor)
