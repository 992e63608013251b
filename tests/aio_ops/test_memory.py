import ctypes
import gc
import mmap
import os
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio_ops import HostArena, Span
from aio_ops.memory import align_up

PAGE_BYTES = mmap.PAGESIZE
HUGEPAGE_BYTES = 2 << 20


class Owner:
    """Memory whose end can be watched."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = ctypes.create_string_buffer(size_bytes)

    def span(self) -> Span:
        return Span(ctypes.addressof(self.buffer), len(self.buffer), self)


def mapping_flags(address: int) -> set[str] | None:
    """Return what the kernel notes about the mapping at an address, or None if there is none."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, stop = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return set(rest.split())
    return None


def mapped_bytes(address: int) -> int:
    """Return the size of what is mapped at an address without a hole or a change."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        start, stop = (int(bound, 16) for bound in line.split(" ", 1)[0].split("-"))
        if start <= address < stop:
            return stop - start
    return 0


@given(st.integers(-5, 40), st.integers(-5, 40))
def test_a_part_of_a_span_is_inside_it(offset_bytes: int, size_bytes: int) -> None:
    owner = object()
    span = Span(1000, 32, owner)
    if offset_bytes >= 0 and size_bytes >= 0 and offset_bytes + size_bytes <= 32:
        part = span.sub(offset_bytes, size_bytes)
        assert (part.address, part.size_bytes) == (1000 + offset_bytes, size_bytes)
        assert part.owner is owner
    else:
        with pytest.raises(ValueError, match="not inside a span of 32 bytes"):
            span.sub(offset_bytes, size_bytes)


@pytest.mark.parametrize(("address", "size_bytes"), [(0, 1), (-4096, 1), (4096, -1)])
def test_a_span_that_cannot_be_is_refused(address: int, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="a span"):
        Span(address, size_bytes, None)


def test_an_empty_span_may_be_anywhere() -> None:
    assert Span(0, 0, None).sub(0, 0).size_bytes == 0


def test_a_view_is_the_memory_itself_and_keeps_its_owner() -> None:
    owner = Owner(16)
    watch = weakref.ref(owner)
    span = owner.span()
    view = span.sub(4, 8).view()
    assert (view.nbytes, view.format, view.readonly) == (8, "B", False)
    view[:] = b"12345678"
    assert owner.buffer.raw == bytes(4) + b"12345678" + bytes(4)
    part = view[2:4]
    del owner, span, view
    gc.collect()
    assert watch() is not None
    assert bytes(part) == b"34"
    del part
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize(
    ("asked_bytes", "size_bytes"),
    [
        (1, PAGE_BYTES),
        (3 * PAGE_BYTES, 3 * PAGE_BYTES),
        (HUGEPAGE_BYTES, HUGEPAGE_BYTES),
        (3 * HUGEPAGE_BYTES + PAGE_BYTES + 1, 3 * HUGEPAGE_BYTES + 2 * PAGE_BYTES),
    ],
)
@pytest.mark.parametrize("hugepages", [True, False])
def test_an_arena_maps_exactly_what_was_asked(
    *, asked_bytes: int, size_bytes: int, hugepages: bool
) -> None:
    with HostArena(asked_bytes, hugepages=hugepages) as arena:
        assert (arena.size_bytes, arena.used_bytes) == (size_bytes, 0)
        span = arena.carve(size_bytes)
        assert arena.used_bytes == size_bytes
        span.view()[-1] = 7  # the last byte is there
        flags = mapping_flags(span.address)
        assert flags is not None
        assert "dc" in flags  # not copied by fork
        assert mapped_bytes(span.address) == size_bytes  # and both ends were given back
        if hugepages and size_bytes >= HUGEPAGE_BYTES:
            assert span.address % HUGEPAGE_BYTES == 0
            assert ("hg" in flags) == arena.hugepages
        else:
            assert span.address % PAGE_BYTES == 0
            assert not arena.hugepages
            assert "hg" not in flags


def test_what_is_mapped_for_alignment_is_given_back() -> None:
    def address_space_bytes() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * PAGE_BYTES

    before = address_space_bytes()
    arenas = [HostArena(HUGEPAGE_BYTES) for _ in range(16)]
    added_bytes = address_space_bytes() - before
    assert 16 * HUGEPAGE_BYTES <= added_bytes <= 18 * HUGEPAGE_BYTES
    for arena in arenas:
        arena.close()
    assert address_space_bytes() - before <= 2 * HUGEPAGE_BYTES


def test_an_arena_really_gets_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text(encoding="ascii"):
        pytest.skip(f"{setting} does not allow huge pages here")

    def huge_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "AnonHugePages" in line)

    with HostArena(4 * HUGEPAGE_BYTES) as arena:
        view = arena.carve(4 * HUGEPAGE_BYTES).view()
        before = huge_bytes()
        view[:] = bytes(len(view))
        assert arena.hugepages
        if huge_bytes() == before:
            pytest.skip("the kernel has no free huge pages now")


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 20000), st.sampled_from([1, 64, 512, 4096, 16384])),
        max_size=12,
    )
)
def test_carved_spans_are_aligned_and_apart(requests: list[tuple[int, int]]) -> None:
    with HostArena(16 * PAGE_BYTES) as arena:
        spans: list[Span] = []
        for size_bytes, alignment_bytes in requests:
            used_bytes = arena.used_bytes
            try:
                span = arena.carve(size_bytes, alignment_bytes=alignment_bytes)
            except MemoryError as error:
                assert used_bytes + size_bytes + alignment_bytes > arena.size_bytes
                assert f"{size_bytes} bytes aligned to {alignment_bytes}" in str(error)
                assert f"{used_bytes} of its {arena.size_bytes} bytes are used" in str(error)
                assert arena.used_bytes == used_bytes  # a refusal takes nothing
                continue
            assert span.address % alignment_bytes == 0
            assert span.size_bytes == size_bytes
            assert not any(span.view())
            span.view()[:] = bytes([len(spans) + 1]) * size_bytes
            spans.append(span)
        for number, span in enumerate(spans, 1):
            assert set(span.view()) == {number}
        assert arena.used_bytes <= arena.size_bytes


def test_senseless_requests_are_refused() -> None:
    for size_bytes in (0, -1):
        with pytest.raises(ValueError, match=f"at least one byte, {size_bytes} were asked for"):
            HostArena(size_bytes)
    with HostArena(PAGE_BYTES) as arena:
        with pytest.raises(ValueError, match="at least one byte"):
            arena.carve(0)
        for alignment_bytes in (0, -4096, 3000):
            with pytest.raises(ValueError, match=f"power of two, got {alignment_bytes}"):
                arena.carve(1, alignment_bytes=alignment_bytes)
        assert arena.used_bytes == 0
    with pytest.raises(RuntimeError, match="the arena is closed"):
        arena.carve(1)


def test_memory_that_the_machine_lacks_is_an_error_with_a_remedy() -> None:
    with pytest.raises(MemoryError, match=rf"cannot map {1 << 60} bytes .* lower the host memory"):
        HostArena(1 << 60)


def test_closing_leaves_memory_in_use_and_unmaps_it_after() -> None:
    arena = HostArena(PAGE_BYTES)
    span = arena.carve(PAGE_BYTES)
    address = span.address
    view = span.view()
    watch = weakref.ref(span.owner)
    arena.close()
    arena.close()
    del span
    gc.collect()
    view[:] = b"\x01" * PAGE_BYTES
    assert mapping_flags(address) is not None
    assert watch() is not None
    del view
    gc.collect()
    assert watch() is None
    assert "dc" not in (mapping_flags(address) or set())  # unmapped; nothing of ours is there


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_arena_and_unmaps_nothing() -> None:
    arena = HostArena(4 * PAGE_BYTES)
    address = arena.carve(1).address
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if mapping_flags(address) is None:
                # What the child maps next may well lie where the arena was.
                library = ctypes.CDLL(None)
                library.mmap.restype = ctypes.c_void_p
                library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
                fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
                mapped = library.mmap(address, 4 * PAGE_BYTES, 3, fixed, -1, 0)
                arena.close()
                del arena
                gc.collect()
                code = 0 if mapped == address and mapping_flags(address) is not None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mapping_flags(address) is not None
    arena.close()


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_rounding_up(size_bytes: int, alignment_bytes: int) -> None:
    rounded = align_up(size_bytes, alignment_bytes)
    assert rounded % alignment_bytes == 0
    assert size_bytes <= rounded < size_bytes + alignment_bytes


@pytest.mark.parametrize("size_bytes", [1 << 57, 1 << 62, 1 << 64])
def test_more_than_the_address_space_is_refused(size_bytes: int) -> None:
    with pytest.raises(MemoryError, match="more than the address space"):
        HostArena(size_bytes)
