"""A clone has the bytes of its call, whatever is written afterwards; or there is none."""

from pathlib import Path

import pytest

from aio_ops import HostArena, SwapFile, clone_file, open_engine
from tests.aio_ops.disks import mounted_ext4, mounted_sharing

SIZE_BYTES = 1 << 20


def test_a_clone_keeps_what_is_overwritten(tmp_path: Path) -> None:
    arena = HostArena(2 * SIZE_BYTES)
    written, found = arena.carve(SIZE_BYTES), arena.carve(SIZE_BYTES)
    with mounted_sharing(tmp_path) as disk, open_engine("auto", directory=disk) as engine:
        (disk / "a").mkdir()
        (disk / "b").mkdir()
        with pytest.warns(RuntimeWarning, match="the same device"):
            striped = engine.create_striped_file(
                [disk / "a", disk / "b"], SIZE_BYTES, weights=[1, 1]
            )
        for file in (SwapFile.create(disk, SIZE_BYTES), striped):
            written.view()[:] = b"\1" * SIZE_BYTES
            engine.submit_write(file, 0, written).wait()
            clone = clone_file(file)
            assert clone is not None
            assert clone.direct == file.direct
            written.view()[:] = b"\2" * SIZE_BYTES
            engine.submit_write(file, 0, written).wait()
            engine.submit_read(clone, 0, found).wait()
            assert bytes(found.view()) == b"\1" * SIZE_BYTES
            clone.close()
            file.close()
        whole = SwapFile.create(disk, 200 << 20)
        assert clone_file(whole) is None, "there is no room to write over all of it"
        whole.close()


def test_there_is_none_where_bytes_cannot_be_shared(tmp_path: Path) -> None:
    with mounted_ext4(tmp_path, 16 << 20) as disk:
        file = SwapFile.create(disk, SIZE_BYTES)
        assert clone_file(file) is None
        file.close()


@pytest.mark.nvme
def test_a_closed_file_is_an_error(scratch: Path) -> None:
    file = SwapFile.create(scratch, SIZE_BYTES)
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        clone_file(file)
