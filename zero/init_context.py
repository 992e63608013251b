"""`zero.Init`: models whose parameters are sharded as soon as their modules are built.

[Note: when a module is built] torch tells of every parameter and submodule that is registered. A
module that has registered parameters is built once its `__init__` is on no frame of the stack any
more; it is then sharded at the next registration, or when the context ends. Sharding a module early
would not be wrong, only slow: initialisers work on sharded parameters too. Nothing is patched.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from offload import Spool
from zero.comm import Communicator, init_distributed
from zero.config import ZeroConfig, load_config
from zero.errors import ConfigError
from zero.materialize import InitFunction, initialise_module
from zero.nursery import Nursery
from zero.planning import ConfigSource, open_spool_engine
from zero.settings import NvmeSettings

_log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Init:
    """Shard modules as they are built inside a `with` block, or a finished module at once.

    A parameter keeps its own type, so that later initialisers give the bits of an unsharded model;
    `zero.initialize` casts to the type that the configuration names.

    Args:
        module: a finished module, possibly on `meta`, to shard at once.
        data_parallel_group: only the default group is available.
        mem_efficient_linear: without effect; nothing is replaced.
        remote_device: where shards rest until `zero.initialize`: "cpu" or "nvme"; the
            configuration's `offload_param` comes first.
        pin_memory: without effect before `zero.initialize`.
        config_dict_or_path: a ZeRO configuration.
        config: an older name of `config_dict_or_path`.
        enabled: False makes this do nothing at all.
        dtype: keep parameters in this type instead of their own.
        init_fn: for modules on `meta`: sets the parameters and buffers of one module.
        unavailable: further arguments of the field, which must have their defaults.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,  # noqa: FBT001, FBT002, ARG002  the field's signature
        remote_device: str | None = None,
        pin_memory: bool = False,  # noqa: FBT001, FBT002, ARG002  the field's signature
        config_dict_or_path: ConfigSource | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002  the field's signature
        dtype: torch.dtype | None = None,
        *,
        init_fn: InitFunction | None = None,
        **unavailable: Any,
    ) -> None:
        self.report = ""
        """One line on what was sharded, once it is."""
        self._enabled = enabled
        self._numel = self._count = 0
        self._pending: list[nn.Module] = []
        self._handles: list[Any] = []
        if not enabled:
            return
        _check_arguments(data_parallel_group, dtype, unavailable)
        nvme = _resting_place(remote_device, config_dict_or_path or config)
        made_group = init_distributed()
        self._nursery = Nursery(
            Communicator(),
            Spool(lambda: open_spool_engine(nvme), nvme.path if nvme is not None else None),
            dtype,
            made_group,
        )
        if module is not None:
            self._convert(module, init_fn)
            self._close_report()

    def __enter__(self) -> Self:
        if self._enabled:
            self._pending.clear()
            _active().append(self)
            self._handles = [
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enabled:
            return
        for handle in self._handles:
            handle.remove()
        _active().remove(self)
        if kind is None:
            for module in self._pending:
                self._shard(module)
            self._close_report()
        self._pending.clear()

    def _on_parameter(self, module: nn.Module, _name: str, _parameter: Any) -> None:
        if not self._is_mine():
            return
        self._shard_built()
        if all(module is not other for other in self._pending):
            self._pending.append(module)

    def _on_module(self, _module: nn.Module, _name: str, _child: Any) -> None:
        if self._is_mine():
            self._shard_built()

    def _is_mine(self) -> bool:
        """Tell whether this is the innermost context of this thread."""
        return _active()[-1:] == [self]

    def _shard_built(self) -> None:
        """Shard every module that is built, see [Note: when a module is built]."""
        if not self._pending:
            return
        building = _under_construction()
        still = []
        for module in self._pending:
            if id(module) in building:
                still.append(module)
            else:
                self._shard(module)
        self._pending = still

    def _shard(self, module: nn.Module, prefix: str = "") -> None:
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{prefix or type(module).__name__}.{key}"
            numel = self._nursery.adopt(name, parameter)
            self._numel += numel
            self._count += numel > 0

    def _convert(self, model: nn.Module, init_fn: InitFunction | None) -> None:
        """Materialise and shard a finished model, module by module, children first."""
        tensors = [*model.parameters(), *model.buffers()]
        on_meta = {id(tensor) for tensor in tensors if tensor.is_meta}
        done: set[int] = set()

        def walk(module: nn.Module, name: str) -> None:
            if id(module) in done:
                return
            done.add(id(module))
            for key, child in module.named_children():
                walk(child, f"{name}.{key}" if name else key)
            initialise_module(name, module, on_meta, init_fn)
            self._shard(module, name)

        walk(model, "")

    def _close_report(self) -> None:
        nursery = self._nursery
        place = nursery.spool.directory or "host memory"
        self.report = (
            f"zero.Init: {self._count} parameters with {self._numel:,} elements are partitioned"
            f" over {nursery.communicator.world_size} ranks; this rank holds"
            f" {nursery.spool.resting_bytes:,} bytes in {place}"
        )
        _log.info(self.report)


_local = threading.local()


def _active() -> list[Init]:
    """Return the contexts that this thread is in, the innermost last."""
    if not hasattr(_local, "contexts"):
        _local.contexts = []
    found: list[Init] = _local.contexts
    return found


def _under_construction() -> set[int]:
    """Return the ids of the objects whose `__init__` is on the stack."""
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            found.add(id(frame.f_locals.get(code.co_varnames[0])))
        frame = frame.f_back
    return found


def _check_arguments(group: Any, dtype: torch.dtype | None, unavailable: dict[str, Any]) -> None:
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ConfigError("zero.Init: data_parallel_group must be the default group")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"zero.Init: dtype {dtype} cannot be trained; use one of {_DTYPES}")
    known = {
        "mpu",
        "zero_param_parallel_group",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "sequence_data_parallel_group",
        "param_swapper",
        "tensor_overrides",
    }
    for name, value in unavailable.items():
        if name not in known:
            raise TypeError(f"zero.Init has no argument {name!r}")
        if value and name != "tensor_overrides":
            raise ConfigError(f"zero.Init: {name} is not available in this version")


def _resting_place(remote_device: str | None, source: ConfigSource | None) -> NvmeSettings | None:
    """Return the directory where shards rest until there is an engine, or None for host memory."""
    if remote_device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(
            f'zero.Init: remote_device must be "cpu" or "nvme", got {remote_device!r}'
        )
    device = remote_device
    paths: tuple[NvmeSettings, ...] = ()
    if source is not None:
        parsed = source if isinstance(source, ZeroConfig) else load_config(source)
        paths = parsed.nvme_paths()
        if parsed.zero.offload_param is not None:
            device = parsed.zero.offload_param.device
    if device != "nvme":
        return None
    if not paths:
        raise ConfigError(
            'zero.Init: shards shall rest on "nvme", but no path is known; give a configuration'
            " with zero_optimization.offload_param.nvme_path"
        )
    return paths[0]
