"""The kernels under test: each implementation, the native one on up to three threads."""

import pytest

from offload.kernels import Kernels
from tests.support.kernels import IMPLEMENTATIONS, make_kernels


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda param: f"{param[0]}-{param[1]}")
def kernels(request) -> Kernels:
    return make_kernels(*request.param)
