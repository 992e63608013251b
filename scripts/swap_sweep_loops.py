"""The two loops that swap_sweep.py times: real training, and the same bytes without a model."""

import importlib
import json
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lm_model import VOCABULARY, ModelShape, build_model
from lm_training import device_of
from swap_sweep_cases import Case, Step

import zero
from aio_ops import HostArena
from aio_ops.tune.apply import merge
from estimators import Tier
from estimators.placement import in_play_bytes
from offload import AdamWScalars, Ledger, LedgerSnapshot, Store, StoreParts, load_kernels, update
from zero import machine
from zero.config import load_config
from zero.planning import open_io_engine

SCALARS = AdamWScalars.from_hyperparameters(
    lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1, grad_scale=1.0
)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class Job:
    """A model that can be made again for every case, and what it is trained on."""

    name: str
    make: Callable[[], tuple[torch.nn.Module, Any]]
    """Returns the model and a batch."""
    init_fn: Callable[[torch.nn.Module], None] | None = None
    """Gives values to a model on `meta`; they do not change how long anything takes."""


def job_of(name: str, sequence: int) -> Job | None:
    """Return what a size, a model's config.json or `module:function` stands for, or None."""
    if re.fullmatch(r"\d+(\.\d+)?[KMB]", name):
        shape = shape_of(float(name[:-1]) * _UNITS[name[-1]], sequence)
        return _language_model(name, shape)
    if ":" in name:
        return Job(name, _function(name))
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    names = (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"))
    found = [next((document[key] for key in keys if key in document), None) for keys in names]
    hidden, layers = found
    if hidden is None or layers is None:
        return None
    heads = document.get("num_attention_heads", document.get("n_head", max(1, hidden // 64)))
    return _language_model(name, ModelShape(hidden, layers, heads, sequence))


def shape_of(parameters: float, sequence: int) -> ModelShape:
    """Return a transformer of about so many parameters: 64 times as wide as deep."""
    hidden = max(64, round((64 * parameters / 12) ** (1 / 3) / 64) * 64)
    return ModelShape(hidden, max(1, round(parameters / 12 / hidden**2)), hidden // 64, sequence)


def _language_model(name: str, shape: ModelShape) -> Job:
    def make() -> tuple[torch.nn.Module, Any]:
        tokens = torch.arange(shape.sequence).remainder(VOCABULARY).unsqueeze(0)
        return build_model(shape, on_meta=True), (tokens, tokens)

    return Job(name, make, _fill)


def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.constant_(parameter, 0.01)


def _function(name: str) -> Callable[[], tuple[torch.nn.Module, Any]]:
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name} cannot be used: {error}") from error
    made: Callable[[], tuple[torch.nn.Module, Any]] = found
    return made


def base_of(document: dict[str, Any], directory: Path | None, dtype: str | None) -> dict[str, Any]:
    """Return a configuration to sweep around: it has a batch of one and names its directory."""
    base: dict[str, Any] = json.loads(json.dumps(document))
    for name in ("train_batch_size", "gradient_accumulation_steps", "scheduler"):
        base.pop(name, None)
    base["train_micro_batch_size_per_gpu"] = 1
    base.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-4}})
    if dtype is not None:
        base.pop("fp16", None)
        base["bf16"] = {"enabled": dtype == "bf16"}
    if directory is not None:
        where = [{"path": str(directory.resolve())}]
        base = merge(base, {"tiers": {"nvme": where}})
    return base


def train(job: Job, config: dict[str, Any], steps: int) -> list[Step]:
    """Train a few steps and return those after the first."""
    model, batch = job.make()
    engine, _, _, _ = zero.initialize(model=model, config=config, init_fn=job.init_fn)
    try:
        device = device_of(engine)
        batch = _moved(batch, device)
        found = []
        for _ in range(steps + 1):
            before, begin = engine.ledger.snapshot(), time.perf_counter()
            engine.backward(_loss(engine, batch))
            waited, updating = engine.ledger.snapshot(), time.perf_counter()
            engine.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(_step(engine.ledger, before, waited, (begin, updating)))
        return found[1:]
    finally:
        engine.destroy()


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_moved(value, device) for value in batch]
    return batch


def _loss(engine: Any, batch: Any) -> torch.Tensor:
    """Return a scalar, whatever the model returns."""
    if isinstance(batch, dict):
        output = engine(**batch)
    else:
        output = engine(*batch) if isinstance(batch, list) else engine(batch)
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss if loss.dim() == 0 else loss.float().square().mean()


def _step(
    ledger: Ledger, before: LedgerSnapshot, waited: LedgerSnapshot, times: tuple[float, float]
) -> Step:
    """Return a step that began at the first time and updated from the second on until now."""
    end = time.perf_counter()
    moved = ledger.snapshot().minus(before)
    return Step(
        end - times[0],
        end - times[1] + waited.minus(before).stall_seconds,
        moved.nvme_read_bytes,
        moved.nvme_write_bytes,
        {name: spent for name, spent in moved.seconds.items() if spent > 0},
    )


def imitate(job: Job, config: dict[str, Any], steps: int) -> list[Step]:
    """Move what training would, through the same plan and store, without model or autograd."""
    model, _ = job.make()
    plan = zero.plan_memory(model, config)
    settings = load_config(config).settings(1)
    tiers = settings.tiers
    parts = StoreParts(
        open_io_engine(settings),
        plan.nvme[0].path if plan.nvme else None,
        load_kernels(thread_count=machine.thread_count(1)),
        Ledger(),
        stripes=plan.nvme,
        burst=tiers.write_burst,
        measures_schedule=tiers.measures_schedule,
        pins_slots=settings.optimizer_offload.pin_memory,
    )
    with closing(Store(plan.memory, parts)) as store, _scratch(store) as arena:
        found = []
        for _ in range(steps + 1):
            before, begin = store.ledger.snapshot(), time.perf_counter()
            _pass_over(store, arena)
            waited, updating = store.ledger.snapshot(), time.perf_counter()
            update(store, [SCALARS] * _group_count(store), lambda _: None)
            found.append(_step(store.ledger, before, waited, (begin, updating)))
        return found[1:]


def _group_count(store: Store) -> int:
    return 1 + max(spec.param_group for spec in store.plan.request.segments)


def _scratch(store: Store) -> AbstractContextManager[HostArena]:
    """Return memory for the largest shard, which stands for a unit's flat buffer."""
    segments = store.plan.request.segments
    return HostArena(
        max(
            spec.layout(1).shard_numel * max(spec.element.size_bytes, spec.gradient.size_bytes)
            for spec in segments
        )
    )


def _pass_over(store: Store, arena: HostArena) -> None:
    """Read every shard for a forward, again for a backward, and put every gradient."""
    memory = arena.whole()
    order = range(len(store.plan.request.segments))
    for position in order:
        _read(store, position, memory, order[position + 1 :])
    for position in reversed(order):
        _read(store, position, memory, order[:position][::-1])
        spec = store.plan.request.segments[position]
        if spec.trainable:
            size_bytes = spec.layout(1).shard_numel * spec.gradient.size_bytes
            store.add_gradient(position, memory.sub(0, size_bytes))


def _read(store: Store, position: int, memory: Any, following: Iterable[int]) -> None:
    spec = store.plan.request.segments[position]
    if not store.plan.is_in_place(position):
        size_bytes = spec.layout(1).shard_numel * spec.element.size_bytes
        store.read_parameters(position, memory.sub(0, size_bytes))
    for index in following:
        if not store.read_ahead_parameters(index):
            break


def rests_on_nvme(config: dict[str, Any]) -> bool:
    """Tell whether a configuration lets anything rest on NVMe."""
    settings = load_config(config).settings(1)
    return Tier.NVME in (settings.parameter_offload.tier, settings.optimizer_offload.tier)


def middle(steps: list[Step]) -> Step:
    """Return the medians of several steps."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    seconds = statistics.median(step.seconds for step in steps)
    paging = statistics.median(step.paging_seconds for step in steps)
    return replace(ordered[len(ordered) // 2], seconds=seconds, paging_seconds=paging)


def measure(job: Job, config: dict[str, Any], case: Case, steps: int, *, synthetic: bool) -> Step:
    """Run one case once."""
    changed = merge(config, case.part())
    run = imitate if synthetic else train
    return middle(run(job, changed, steps))


def everything_bytes(job: Job, config: dict[str, Any]) -> int:
    """Return the host memory that would hold all that a step uses, so that nothing pages."""
    model, _ = job.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is more than this machine has, perhaps
        plan = zero.plan_memory(model, merge(config, {"tiers": {"host_memory": 1 << 60}}))
    return in_play_bytes(plan.memory.request)
