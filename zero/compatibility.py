"""`zero.initialize`, in the field's call shape: a wide signature that the size rules exempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from aio_ops import Engine
from zero.build import build_runtime
from zero.comm import Communicator, init_distributed
from zero.config.effective import written_values
from zero.durable import DurableRun
from zero.engine import ZeroEngine
from zero.errors import ConfigError
from zero.loader import make_loader
from zero.lr_schedules import make_schedule
from zero.materialize import InitFunction, outside_inference_mode
from zero.nursery import made_group_before
from zero.optimizer import ZeroOptimizer, make_optimizer
from zero.planning import (
    Changes,
    ConfigSource,
    Recalled,
    make_blueprint,
    open_io_engine,
    parse_config,
)

InitializeResult = tuple[ZeroEngine, ZeroOptimizer | None, "DataLoader[Any] | None", Any]


def _check_schedule(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse what is no scheduler, or sets the rates of an optimizer which trains nothing here."""
    if not (scheduler is None or callable(scheduler) or hasattr(scheduler, "step")):
        raise ConfigError(
            f"lr_scheduler must be a scheduler with step(), or a function from the optimizer to"
            f" one, got {type(scheduler).__name__}"
        )
    driven = getattr(scheduler, "optimizer", None)
    if isinstance(driven, torch.optim.Optimizer) and driven is not optimizer:
        raise ConfigError(
            f"lr_scheduler ({type(scheduler).__name__}) sets the rates of another optimizer than"
            " the one that trains: pass that one as optimizer, or a function from the optimizer to"
            " a scheduler, lr_scheduler=lambda optimizer: ..."
        )


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    *,
    init_fn: InitFunction | None = None,
    config_params: ConfigSource | None = None,
    io_engine: Engine | None = None,
) -> InitializeResult:
    """Shard a model and return `(engine, optimizer, dataloader, lr_scheduler)`.

    Args:
        args: an object whose `deepspeed_config` is the configuration.
        model: the model, on the CPU or on `meta`.
        optimizer: a torch AdamW; without it the configuration's `optimizer` section is used, and
            without that either the engine only runs forward.
        model_parameters: parameters or parameter groups for the configuration's optimizer.
        training_data: a dataset, for a loader of the configured micro-batch size.
        lr_scheduler: a torch scheduler, or a function from the optimizer to one.
        collate_fn: passed to the loader.
        config: a ZeRO configuration: a path, a dictionary or base64 text.
        init_fn: for a model on `meta`: sets the parameters and buffers of one module.
        config_params: an older name of `config`.
        io_engine: an open engine to use instead of the configured one; the engine closes it.

    Raises:
        ConfigError: if the configuration, the model or the scheduler cannot be used.
        PlanError: if the budgets cannot hold the model.
        DurableError: if `tiers.durable` names a run that lives, or that cannot be resumed.
        OSError: if the NVMe path cannot be used or is too full.
    """
    model = check_given(model)
    _check_schedule(lr_scheduler, optimizer)
    source = choose_config(config, config_params, getattr(args, "deepspeed_config", None))
    parsed = parse_config(source, model)
    on_processor = parsed.tiers is not None and parsed.tiers.device == "cpu"
    owns_group = init_distributed("gloo" if on_processor else None) or made_group_before(model)
    communicator = Communicator()
    settings = parsed.settings(communicator.world_size)
    with outside_inference_mode():
        own_optimizer = make_optimizer(model, optimizer, model_parameters, settings.optimizer)
        durable, io = None, io_engine
        try:
            io = io or open_io_engine(settings)
            durable = DurableRun.begin(settings, model, communicator, io, own_optimizer)
            blueprint = make_blueprint(
                model,
                settings,
                own_optimizer,
                io,
                communicator.world_size,
                communicator.local_world_size,
                Changes(recalled=durable.recalled if durable is not None else Recalled()),
            )
            runtime = build_runtime(blueprint, io, communicator, init_fn, durable=durable)
        except BaseException:
            if io is not None:
                io.close()
            if durable is not None:
                durable.close()
            raise
    scheduler = lr_scheduler
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        scheduler = lr_scheduler(own_optimizer)
    if scheduler is None and settings.scheduler is not None and own_optimizer is not None:
        named = settings.scheduler
        scheduler = make_schedule(own_optimizer, named.type_name, named.parameters)
    engine = ZeroEngine(
        model,
        runtime,
        settings,
        blueprint,
        own_optimizer,
        scheduler,
        loss_scaler=parsed.loss_scaler(),
        owns_group=owns_group,
    )
    loader = (
        make_loader(training_data, collate_fn, settings, communicator)
        if training_data is not None
        else None
    )
    engine.training_dataloader = loader
    engine.configuration = written_values(parsed)
    if durable is not None:
        engine.adopt(durable)
    return engine, own_optimizer, loader, scheduler


def check_given(model: Any) -> nn.Module:
    """Return what was given as the model, or raise if it is none."""
    if model is None:
        raise ConfigError("zero.initialize needs a model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "this model is the result of torch.compile; pass the model itself, and compile its"
            " blocks with block.compile() before zero.initialize"
        )
    if isinstance(model, ZeroEngine):
        raise ConfigError("this model is an engine already; pass the model itself")
    return model


def choose_config(*sources: ConfigSource | None) -> ConfigSource:
    """Return the one configuration that was given as `config`, `config_params` or in `args`.

    Raises:
        ConfigError: if none was given, or more than one.
    """
    names = ("config", "config_params", "args.deepspeed_config")
    given = {
        name: source for name, source in zip(names, sources, strict=True) if source is not None
    }
    if len(given) != 1:
        raise ConfigError(
            f"the configuration is given as {' and as '.join(given)}; keep one"
            if given
            else "no configuration: pass config=, or args with deepspeed_config"
        )
    return next(iter(given.values()))
