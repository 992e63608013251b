from collections.abc import Iterator

import pytest

from aio_ops.handles import AioHandle, aio_handle


@pytest.fixture
def handle() -> Iterator[AioHandle]:
    with aio_handle(1 << 20, 32) as handle:
        yield handle
