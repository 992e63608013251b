"""Every way to touch a sharded parameter is right or raises: none is silent, none is a crash.

Each case runs once on a parameter that rests on NVMe and once on a plain twin; results, values
afterwards and gradients must be the same.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme
NAME = "blocks.0.project.weight"  # 16 x 16, so that products with itself exist


@pytest.fixture(scope="module")
def engine(module_scratch: Path) -> Iterator[zero.ZeroEngine]:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(module_scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )
    made, _, _, _ = zero.initialize(model=make_model(), config=config)
    assert made.plan.memory.swap_file_bytes > 0
    yield made
    made.destroy()


@pytest.fixture(params=["at rest", "awaiting its backward"])
def pair(
    engine: zero.ZeroEngine, request: pytest.FixtureRequest
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Return a sharded parameter and a plain one with the same values; both restored after."""
    plain = make_model().blocks[0].project.weight
    sharded = engine.module.blocks[0].project.weight
    is_awaiting = request.param == "awaiting its backward"
    graph = engine(*make_batch(0)) if is_awaiting else None
    yield sharded, plain
    if is_awaiting:
        del graph
        engine(*make_batch(0)).backward()
    with torch.no_grad():
        sharded.copy_(make_model().blocks[0].project.weight)
    engine.zero_grad()


def same(ours: Any, theirs: Any) -> bool:
    """Compare results of any kind: values, types and shapes."""
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        with torch.no_grad():
            return bool(torch.equal(ours.detach().clone(), theirs.detach()))
    if isinstance(theirs, np.ndarray):
        return bool((ours == theirs).all()) and ours.dtype == theirs.dtype
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def seeded(touch: Callable[[Any], Any], weight: Any) -> Any:
    torch.manual_seed(3)
    return touch(weight)


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda w: w.shape,
    "size": lambda w: (w.size(), w.size(0), w.dim(), w.ndim, len(w)),
    "numel": lambda w: (w.numel(), torch.numel(w), w.nelement(), w.nbytes, w.element_size()),
    "dtype": lambda w: (w.dtype, w.device, w.layout, w.is_floating_point(), w.is_complex()),
    "stride": lambda w: (w.stride(), w.is_contiguous()),
    "flags": lambda w: (w.is_leaf, w.grad_fn, w.requires_grad, w.grad, w.is_cuda, w.is_meta),
    "shared or pinned": lambda w: (w.is_shared(), w.is_pinned()),
    "hash": lambda w: hash(w) == hash(w) and w in {w},
    "class": lambda w: (isinstance(w, nn.Parameter), isinstance(w, torch.Tensor)),
    "zeros_like": torch.zeros_like,
    "new_ones": lambda w: w.new_ones(3),
    "optimizer construction": lambda w: len(torch.optim.SGD([w], lr=0.1).param_groups),
    "same type cast": lambda w: w.float() is w and w.to("cpu") is w and w.contiguous() is w,
}

READS: dict[str, Callable[[Any], Any]] = {
    "+": lambda w: w + 1,
    "reflected -": lambda w: 1 - w,
    "@": lambda w: w @ w.t(),
    "unary -": lambda w: -w,
    "==": lambda w: w == w.t(),
    "bool": lambda w: bool((w > 0).any()),
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "clone": lambda w: w.clone(),
    "detach clone": lambda w: w.detach().clone(),
    "data": lambda w: w.data + 0,
    "row": lambda w: w[1] * 2,
    "element": lambda w: w[1, 2].item(),
    "slice": lambda w: w[2:5, ::2].clone(),
    "mask": lambda w: w[w > 0],
    "index list": lambda w: w[[0, 3]],
    "index tensor": lambda w: w[torch.tensor([1, 1])],
    "t": lambda w: w.t().contiguous(),
    "T": lambda w: w.T + 0,
    "view": lambda w: w.view(-1).clone(),
    "view of bits": lambda w: w.view(torch.int32) + 0,
    "reshape": lambda w: w.reshape(4, -1) + 0,
    "permute": lambda w: w.permute(1, 0).sum(0),
    "chunk": lambda w: [part + 0 for part in w.chunk(3)],
    "unbind": lambda w: [row.sum() for row in w.unbind()],
    "iteration": lambda w: [row.sum().item() for row in w],
    "expand": lambda w: w.unsqueeze(0).expand(2, -1, -1).sum(),
    "flatten": lambda w: w.flatten()[:5] + 0,
    "max with indices": lambda w: tuple(w.max(0)),
    "to float64": lambda w: w.to(torch.float64),
    "half": lambda w: w.half(),
    "float mean": lambda w: w.float().mean(),
    "to copy": lambda w: w.to("cpu", copy=True),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy(),
    "asarray": lambda w: np.asarray(w.detach()),
    "format": lambda w: f"{w[0, 0].item():.3f}",
    "torch.equal": lambda w: torch.equal(w, w),
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat((w, w.t())),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "linear elsewhere": lambda w: F.linear(torch.ones(2, 16), w),
    "embedding elsewhere": lambda w: F.embedding(torch.tensor([1, 3]), w),
    "foreach norm": lambda w: torch._foreach_norm([w, w]),
    "foreach add": lambda w: torch._foreach_add([w], 1.0),
    "where": lambda w: torch.where(w > 0, w, torch.zeros(())),
    "out": lambda w: torch.add(w.detach(), 1, out=torch.empty(16, 16)),
    "svd": torch.linalg.svdvals,
    "deepcopy": copy.deepcopy,
    "deepcopy of data": lambda w: copy.deepcopy(w.data),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": saved,
    "torch.save of data": lambda w: saved({"weight": w.data})["weight"],
    "vector of parameters": lambda w: nn.utils.parameters_to_vector([w, w]),
    "functional_call": lambda w: torch.func.functional_call(
        nn.Linear(16, 16, bias=False), {"weight": w}, torch.ones(1, 16)
    ),
    "isfinite": lambda w: torch.isfinite(w).all().item(),
    "allclose": lambda w: torch.allclose(w, w + 0),
    "inference mode": torch.inference_mode()(lambda w: w.sum().item()),
    "vmap": lambda w: torch.vmap(torch.sum)(w.detach()),
    "torch.func.grad": lambda w: torch.func.grad(torch.sum)(w.detach()),
    "contains": lambda w: 5.0 in w,
    "histogram": lambda w: torch.histc(w.detach(), bins=4),
    "testing.assert_close": lambda w: torch.testing.assert_close(w, w.clone()),
}


def add_(w: Any) -> None:
    w += 1


def set_item(w: Any) -> None:
    w[1:3] = 5.0


def augmented_item(w: Any) -> None:
    w[0] += 2


def set_data(w: Any) -> None:
    w.data = torch.full((16, 16), 0.5)


def late_view(w: Any) -> None:
    alias = w.detach()
    w.fill_(2.0)
    alias[0].mul_(3)


def merge(w: Any) -> None:
    merged = w.data
    merged += torch.ones(16, 16)


def chunks(w: Any) -> None:
    for number, part in enumerate(w.data.chunk(4)):
        part.fill_(float(number))


def vector(w: Any) -> None:
    nn.utils.vector_to_parameters(torch.arange(256.0), [w])


def swap_halves(w: Any) -> None:
    w[:8] = w[8:].clone()


def from_own_transpose(w: Any) -> None:
    w.copy_(w.t() + 0)


def module_apply(w: Any) -> None:
    module = nn.Linear(16, 16, bias=False)
    module.weight = w
    module.apply(lambda each: each.weight.data.normal_(0, 0.02))


def load(w: Any) -> None:
    module = nn.Linear(16, 16, bias=False)
    module.weight = w
    module.load_state_dict({"weight": torch.arange(256.0).view(16, 16)})


@torch.inference_mode()
def in_inference_mode(w: Any) -> None:
    w.mul_(1.5)
    w[0].add_(w.sum())


def averaged(w: Any) -> None:
    module = nn.Linear(16, 16, bias=False)
    module.weight = w
    average = torch.optim.swa_utils.AveragedModel(module)
    w.add_(1)
    average.update_parameters(module)
    w.copy_(average.module.weight)


def raw(touch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a touch that does not ask `__torch_function__`, as code in C++ does not."""

    def without_asking(weight: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return touch(weight)

    return without_asking


WRITES: dict[str, Callable[[Any], Any]] = {
    "+=": add_,
    "setitem": set_item,
    "augmented setitem": augmented_item,
    "swap halves": swap_halves,
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(0.5),
    "copy_": lambda w: w.copy_(torch.arange(256.0).view(16, 16)),
    "copy_ of a row": lambda w: w.copy_(torch.arange(16.0)),
    "copy_ of itself": from_own_transpose,
    "normal_": lambda w: w.normal_(0, 0.02),
    "uniform_": lambda w: w.data.uniform_(-1, 1),
    "data normal_": lambda w: w.data.normal_(0, 0.02),
    "data row zero_": lambda w: w.data[3].zero_(),
    "data += ": merge,
    "set data": set_data,
    "init.normal_": nn.init.normal_,
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.orthogonal_": nn.init.orthogonal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.eye_": nn.init.eye_,
    "a view made earlier": late_view,
    "chunks": chunks,
    "transposed view": lambda w: w.t()[0].fill_(9.0),
    "bits": lambda w: w.data.view(torch.int32).bitwise_and_(-65536),
    "out=": lambda w: torch.add(torch.ones(16, 16), 1, out=w),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 0.0),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([2]), torch.ones(1, 16)),
    "foreach add_": lambda w: torch._foreach_add_([w], 1.0),
    "foreach copy_": lambda w: torch._foreach_copy_([w], [torch.ones(16, 16)]),
    "foreach lerp_": lambda w: torch._foreach_lerp_([w], [torch.ones(16, 16)], 0.5),
    "raw operator on data": lambda w: raw(lambda data: data.mul_(2))(w.data),
    "raw out= on data": lambda w: raw(lambda data: torch.add(data, 1, out=data))(w.data),
    "apply_": lambda w: w.data.apply_(lambda x: x + 1),
    "map_": lambda w: w.data.map_(torch.ones(16, 16), lambda x, y: x + y),
    "inference mode": in_inference_mode,
    "index_put_": lambda w: w.data.index_put_((torch.tensor([0]),), torch.ones(16)),
    "scatter_": lambda w: w.data.scatter_(0, torch.zeros(1, 16, dtype=torch.long), 3.0),
    "averaged model": averaged,
    "clamp_": lambda w: w.clamp_(-0.01, 0.01),
    "vector_to_parameters": vector,
    "module.apply": module_apply,
    "load_state_dict": load,
}


def sum_twice(view: torch.Tensor) -> torch.Tensor:
    return (view * view).sum() + view.sum()


GRADIENTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "linear elsewhere": lambda w: F.linear(torch.arange(16.0), w).square().sum(),
    "transposed": lambda w: (torch.arange(16.0) @ w.t()).square().sum(),
    "a row": lambda w: w[3].square().sum() + w[1:3].sum(),
    "a view used twice": lambda w: sum_twice(w.view(-1)),
    "chunks": lambda w: sum(part.square().sum() * n for n, part in enumerate(w.chunk(4))),  # type: ignore[misc]
    "twice": lambda w: (w * 2).sum() + w.square().sum(),
    "detached half": lambda w: (w * w.detach()).sum(),
    "mask": lambda w: w[w > 0].square().sum(),
    "functional_call": lambda w: torch.func.functional_call(
        nn.Linear(16, 16, bias=False), {"weight": w}, torch.ones(1, 16)
    ).sum(),
}

REFUSALS: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda w: w.data_ptr(),
    "data_ptr of data": lambda w: w.data.data_ptr(),
    "untyped_storage": lambda w: w.untyped_storage(),
    "storage": lambda w: w.storage(),
    "dlpack": torch.from_dlpack,
    "dlpack of data": lambda w: torch.from_dlpack(w.data),
    "__dlpack__": lambda w: w.__dlpack__(),
    "set_": lambda w: w.set_(torch.ones(2)),
    "set_ of data": lambda w: w.data.set_(torch.ones(2)),
    "resize_": lambda w: w.data.resize_(3),
    "share_memory_": lambda w: w.share_memory_(),
    "data of another shape": lambda w: setattr(w, "data", torch.ones(3)),
    "data of another type": lambda w: setattr(w, "data", torch.ones(16, 16, dtype=torch.float64)),
    "module.half": lambda w: holder(w).half(),
    "copy.copy": copy.copy,
    "jit.trace": lambda w: torch.jit.trace(lambda x: x + w, torch.ones(16, 16)),
    "jit.trace of data": lambda w: torch.jit.trace(lambda x: x + w.data, torch.ones(16, 16)),
    "alias that requires grad": lambda w: w.data.requires_grad_(),
    "grad of another shape": lambda w: setattr(w, "grad", torch.ones(3)),
}


def scripted(weight: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        return torch.jit.script(nn.functional.relu)(weight)


def broadcast(weight: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        torch.distributed.broadcast(weight, 0)
    finally:
        torch.distributed.destroy_process_group()


OTHER_ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "in-place with gradient": (lambda w: w.add_(1), RuntimeError, f"leaf Variable.*{NAME}"),
    "a view in-place with gradient": (lambda w: w[0].add_(1), RuntimeError, f"leaf.*{NAME}"),
    "numpy with gradient": (lambda w: w.numpy(), RuntimeError, "requires grad"),
    "writing its array": (lambda w: w.detach().numpy().fill(0), ValueError, "read-only"),
    "a parameter of an alias": (lambda w: nn.Parameter(w.data), RuntimeError, "of its own"),
    "a parameter of a parameter": (nn.Parameter, RuntimeError, "of its own"),
    "shapes that do not fit": (lambda w: w @ torch.ones(3), RuntimeError, "size mismatch|shapes"),
    "torch.tensor": (torch.tensor, NotImplementedError, "(?i)hpu"),
    "a scripted function": (scripted, RuntimeError, "(?i)hpu"),
    "raw collective": (raw(broadcast), NotImplementedError, "(?i)hpu"),
    "raw addition": (raw(lambda w: w + 1), NotImplementedError, "(?i)hpu"),
    "raw copy": (raw(lambda w: torch.ones(16, 16).copy_(w)), RuntimeError, "(?i)hpu|quantized"),
    "raw write": (raw(lambda w: w.detach().zero_()), NotImplementedError, "(?i)hpu"),
    "raw overwrite": (raw(lambda w: w.copy_(w.new_ones(1))), RuntimeError, "(?i)hpu|grad"),
    "the old dlpack": (torch.utils.dlpack.to_dlpack, RuntimeError, "data pointer"),
    "shared memory pickling of a view": (
        lambda w: w.data.untyped_storage(),
        zero.ShardedAccessError,
        NAME,
    ),
}


def holder(w: Any) -> nn.Module:
    module = nn.Linear(16, 16, bias=False)
    module.weight = w
    return module


@pytest.mark.parametrize("name", METADATA)
def test_metadata_needs_no_values(engine: Any, pair: Any, name: str) -> None:
    before = engine.ledger.snapshot()
    sharded, plain = pair
    assert same(METADATA[name](sharded), METADATA[name](plain))
    assert engine.ledger.snapshot().minus(before).nvme_read_bytes == 0


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("name", READS)
def test_reads_see_the_values(engine: Any, pair: Any, name: str, *, with_gradient: bool) -> None:
    before = engine.ledger.snapshot()
    sharded, plain = pair
    with torch.set_grad_enabled(with_gradient):
        assert same(seeded(READS[name], sharded), seeded(READS[name], plain))
    moved = engine.ledger.snapshot().minus(before)
    assert moved.nvme_read_bytes > 0
    assert moved.nvme_write_bytes == 0


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_kept(engine: Any, pair: Any, name: str) -> None:
    before = engine.ledger.snapshot()
    sharded, plain = pair
    with torch.no_grad():
        seeded(WRITES[name], sharded)
        seeded(WRITES[name], plain)
    assert engine.ledger.snapshot().minus(before).nvme_write_bytes > 0
    with zero.GatheredParameters([sharded]):
        assert type(sharded) is nn.Parameter
        assert torch.equal(sharded, plain)
    assert torch.equal(zero.safe_get_full_fp32_param(sharded), plain.detach())


@pytest.mark.parametrize("name", GRADIENTS)
def test_uses_elsewhere_train(pair: Any, name: str) -> None:
    sharded, plain = pair
    for weight in (sharded, plain):
        GRADIENTS[name](weight).backward()
    assert sharded.grad is not None
    torch.testing.assert_close(sharded.grad.clone(), plain.grad)
    assert torch.equal(zero.safe_get_full_grad(sharded), sharded.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_right_names_parameter_unit_and_fix(pair: Any, name: str) -> None:
    sharded, plain = pair
    with (
        torch.no_grad(),
        pytest.raises(zero.ShardedAccessError, match=rf"{NAME}.*unit blocks\.0\).*; \S+"),
    ):
        REFUSALS[name](sharded)
    assert torch.equal(sharded, plain)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_what_torch_refuses_is_refused(pair: Any, name: str) -> None:
    touch, error, match = OTHER_ERRORS[name]
    sharded, plain = pair
    with pytest.raises(error, match=match):
        touch(sharded)
    assert torch.equal(sharded, plain)


def test_autograd_gets_the_parameter_itself(engine: Any, pair: Any) -> None:
    sharded, plain = pair
    ours = (sharded * sharded).sum()
    before = engine.ledger.snapshot()
    gradients = torch.autograd.grad(ours, [sharded])
    assert engine.ledger.snapshot().minus(before).nvme_read_bytes == 0
    assert torch.equal(gradients[0], torch.autograd.grad((plain * plain).sum(), plain)[0])
    ones = torch.ones(16, 16)
    assert torch.equal(torch.autograd.grad(sharded.t(), sharded, grad_outputs=ones)[0], ones)


def test_printing_describes_without_reading(engine: Any, pair: Any) -> None:
    before = engine.ledger.snapshot()
    sharded, _ = pair
    for text in (repr(sharded), str(sharded), f"{sharded}", repr(sharded.data), repr([sharded])):
        assert NAME in text
        assert "(16, 16)" in text
    assert engine.ledger.snapshot().minus(before).nvme_read_bytes == 0


def test_the_table_is_long_enough() -> None:
    tables = (METADATA, READS, WRITES, GRADIENTS, REFUSALS, OTHER_ERRORS)
    assert sum(map(len, tables)) >= 40
