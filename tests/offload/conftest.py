"""The kernels under test: each implementation, the native one on up to three threads."""

import pytest

from offload.kernels import Kernels
from tests.support.device_kernels import make_device_kernels
from tests.support.kernels import IMPLEMENTATIONS, make_kernels

ON_DEVICES = [
    ("torch", "cpu"),
    pytest.param(("torch", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda param: f"{param[0]}-{param[1]}")
def kernels(request) -> Kernels:
    return make_kernels(*request.param)


@pytest.fixture(params=[*IMPLEMENTATIONS, *ON_DEVICES], ids=lambda param: f"{param[0]}-{param[1]}")
def any_kernels(request) -> Kernels:
    """Return each implementation, also those that work on tensors of a device."""
    kind, where = request.param
    return make_device_kernels(kind, where) if isinstance(where, str) else make_kernels(kind, where)
