"""The `zero_optimization` section."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from zero.config.keys import Auto, Section, detail, key, no_effect, refused
from zero.config.other_values import FolderPath, Free, TextList
from zero.config.values import Choice, Integer, Number, Switch

DEVICES = ("none", "cpu", "nvme")

_SLOTS = "slots are sized and counted from tiers.host_memory and the largest sub-group"
_EXPERTS = "units are repeated blocks and routed experts; ranks may route as they like"
_UNITS = "in stages 0 to 2 new values are gathered once a unit, after the step"
_QUANTISED = "communication is never quantised: every rank gets the exact bits"


class OffloadParam(Section):
    """Where parameters rest."""

    device: Annotated[str, Choice(words=DEVICES)] = key(
        "lowest tier on which parameters may rest", default="none", auto=Auto.FRAMEWORK
    )
    nvme_path: Annotated[Path | None, FolderPath(nullable=True)] = key(
        "directory of the swap file; with device nvme it fills tiers.nvme where that is left out",
        default=None,
        auto=Auto.FRAMEWORK,
    )
    buffer_count: Annotated[int, Integer()] = no_effect(
        "a hint: read buffers", default=5, why=_SLOTS
    )
    buffer_size: Annotated[int, Integer()] = no_effect(
        "a hint: elements of a read buffer", default=100_000_000, why=_SLOTS
    )
    max_in_cpu: Annotated[int | None, Integer(nullable=True)] = key(
        "most elements a node keeps in host memory with device nvme; null leaves it to"
        " tiers.host_memory",
        default=None,
    )
    pin_memory: Annotated[bool, Switch()] = key(
        "where true is written: lock the slots of the swap file in RAM and register them with the"
        " I/O engine, which saves processor time, with device nvme; where that is not allowed"
        " (`ulimit -l`) a warning says so. Left out, nothing is locked",
        default=True,
    )


class OffloadOptimizer(Section):
    """Where optimizer state rests."""

    device: Annotated[str, Choice(words=DEVICES)] = key(
        "lowest tier on which optimizer state may rest", default="none", auto=Auto.FRAMEWORK
    )
    nvme_path: Annotated[Path | None, FolderPath(nullable=True)] = key(
        "directory of the swap file; with device nvme it fills tiers.nvme where that is left out",
        default=None,
        auto=Auto.FRAMEWORK,
    )
    buffer_count: Annotated[int, Integer()] = no_effect(
        "a hint: swap buffers", default=4, why=_SLOTS
    )
    pin_memory: Annotated[bool, Switch()] = key(
        "where true is written: lock the slots of the swap file in RAM and register them with the"
        " I/O engine, which saves processor time, with device nvme; where that is not allowed"
        " (`ulimit -l`) a warning says so. Left out, nothing is locked",
        default=True,
    )
    pipeline_read: Annotated[bool, Switch()] = no_effect(
        "read ahead of the update", default=False, why="the pager always reads ahead"
    )
    pipeline_write: Annotated[bool, Switch()] = no_effect(
        "write behind the update", default=False, why="the pager always writes behind"
    )
    fast_init: Annotated[bool, Switch()] = no_effect(
        "batched initialisation",
        default=False,
        why="state never written is zero and is not read at all",
    )
    ratio: Annotated[float, Number(maximum=1.0)] = no_effect(
        "share of the sub-groups updated by the CPU",
        default=1.0,
        why="tiers.device_memory and tiers.host_memory split state by bytes",
    )
    super_offload: Annotated[bool, Switch()] = no_effect(
        "overlap the CPU update with backward",
        default=False,
        why="no update starts in backward, where it could not be skipped any more",
    )
    cpuadam_cores_perc: Annotated[float, Number(maximum=1.0)] = no_effect(
        "share of the cores for super_offload",
        default=0.8,
        why="the update uses the cores that the process may run on",
    )


class ZenFlow(Section):
    """Importance-aware asynchronous updates; refused as a whole."""

    topk_ratio: Annotated[Any, Free()] = detail("share of important columns", default=0.1)
    select_strategy: Annotated[Any, Free()] = detail("when to select", default="auto")
    select_interval: Annotated[Any, Free()] = detail("steps a selection", default="auto")
    update_interval: Annotated[Any, Free()] = detail("steps an update", default="auto")
    overlap_step: Annotated[Any, Free()] = detail("overlapped update", default=False)
    offload: Annotated[Any, Free()] = detail("offload selected state", default=False)
    auto_ratio: Annotated[Any, Free()] = detail("threshold of the strategy", default=0.99)
    full_warm_up_rounds: Annotated[Any, Free()] = detail("full updates at first", default=0)
    pt_reserved_cores_perc: Annotated[Any, Free()] = detail("cores for torch", default=0.5)
    steps_per_epoch: Annotated[Any, Free()] = detail("internal", default=None)


class LeafModule(Section):
    """Modules whose parameters are gathered as one unit."""

    classes: Annotated[tuple[str, ...], TextList()] = no_effect(
        "class names",
        default=(),
        why=_EXPERTS,
    )
    names: Annotated[tuple[str, ...], TextList()] = no_effect(
        "module names",
        default=(),
        why=_EXPERTS,
    )
    name_suffixes: Annotated[tuple[str, ...], TextList()] = no_effect(
        "suffixes of module names", default=(), why="units are formed from repeated blocks"
    )


def _switch_off(meaning: str, why: str, instead: str) -> Any:
    return refused(meaning, default=False, why=why, instead=instead)


class ZeroOptimization(Section):
    """ZeRO: what is sharded over the ranks, and where it rests."""

    stage: Annotated[int, Integer(maximum=3)] = key(
        "3 shards parameters; 0, 1 and 2 keep them in full on every rank, and shard gradients "
        "and optimizer state all the same, so that the bits are the same in all",
        default=0,
        auto=Auto.FRAMEWORK,
    )
    offload_param: OffloadParam | None = key("where parameters rest", default=None)
    offload_optimizer: OffloadOptimizer | None = key("where optimizer state rests", default=None)
    sub_group_size: Annotated[int, Integer()] = key(
        "largest number of elements that one pass of the optimizer updates; the real one fits a "
        "slot; 0 leaves it to the plan",
        default=1_000_000_000,
    )
    contiguous_gradients: Annotated[bool, Switch()] = no_effect(
        "copy gradients into one buffer", default=True, why="gradient shards are always contiguous"
    )
    reduce_scatter: Annotated[bool, Switch()] = no_effect(
        "reduce-scatter rather than all-reduce",
        default=True,
        why="gradients are always reduce-scattered",
    )
    reduce_bucket_size: Annotated[int, Integer()] = no_effect(
        "elements of one reduction",
        default=500_000_000,
        why="a unit is one reduction, so that no setting can change the bits",
        auto=Auto.HIDDEN_SQUARED,
    )
    use_multi_rank_bucket_allreduce: Annotated[bool, Switch()] = no_effect(
        "merge buckets", default=True, why="a unit is one reduction"
    )
    allgather_partitions: Annotated[bool, Switch()] = no_effect(
        "gather by all-gather", default=True, why=_UNITS
    )
    allgather_bucket_size: Annotated[int, Integer()] = no_effect(
        "elements of one gather", default=500_000_000, why=_UNITS
    )
    overlap_comm: Annotated[bool | None, Switch(nullable=True)] = no_effect(
        "overlap communication with computation",
        default=None,
        why="the runtime orders it by itself",
    )
    load_from_fp32_weights: Annotated[bool, Switch()] = no_effect(
        "restore masters from fp32 weights",
        default=True,
        why="masters are saved and restored in fp32",
    )
    elastic_checkpoint: Annotated[bool, Switch()] = no_effect(
        "checkpoints for another world size",
        default=False,
        why="every checkpoint loads at any world size",
    )
    zenflow: ZenFlow | None = refused(
        "asynchronous updates of the less important gradients",
        default=None,
        why="it changes results: some gradients are applied steps later",
        instead="remove it; read-ahead and write-behind hide the transfers exactly",
    )
    stage3_prefetch_bucket_size: Annotated[int, Integer()] = key(
        "parameters read ahead of their use, at most and while host memory is spare; 0 for none;"
        " a limit that is not written is at least the largest unit",
        default=50_000_000,
        auto=Auto.PREFETCH,
    )
    stage3_param_persistence_threshold: Annotated[int, Integer()] = key(
        "parameters of up to so many elements stay unsharded on the device, on every rank; 0 for"
        " none",
        default=100_000,
        auto=Auto.PERSISTENCE,
    )
    stage3_model_persistence_threshold: Annotated[int, Integer()] = key(
        "elements that may stay unsharded in all; the first of the model that fit",
        default=sys.maxsize,
    )
    stage3_max_live_parameters: Annotated[int, Integer()] = key(
        "parameters gathered and read ahead at once; reading ahead ends there, a module that is"
        " larger is gathered whole; a limit that is not written is at least the root unit and three"
        " others",
        default=1_000_000_000,
        auto=Auto.DEFAULT,
    )
    stage3_max_reuse_distance: Annotated[int, Integer()] = key(
        "a unit keeps its parameters if at most so many elements of others are used before it is"
        " again, and while the plan has room for them; 0 for none",
        default=1_000_000_000,
        auto=Auto.DEFAULT,
    )
    stage3_gather_16bit_weights_on_model_save: Annotated[bool, Switch()] = no_effect(
        "allow save_16bit_model",
        default=False,
        why="save_16bit_model always works, one tensor at a time",
        auto=Auto.FRAMEWORK,
    )
    stage3_module_granularity_threshold: Annotated[int, Integer()] = no_effect(
        "merge small modules", default=0, why="units are formed from repeated blocks"
    )
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, Switch()] = no_effect(
        "gather by all-reduce", default=False, why="one all-gather a unit gives the same bits"
    )
    stage3_allgather_sequential: Annotated[bool, Switch()] = no_effect(
        "gather parameters one by one",
        default=False,
        why="one all-gather a unit gives the same bits",
    )
    ignore_unused_parameters: Annotated[bool, Switch()] = no_effect(
        "allow parameters without a gradient", default=True, why="they are always allowed"
    )
    legacy_stage1: Annotated[bool, Switch()] = _switch_off(
        "the first implementation of stage 1", "it does not exist any more", "remove it"
    )
    round_robin_gradients: Annotated[bool, Switch()] = no_effect(
        "balance copies of gradients",
        default=False,
        why="each gradient goes straight to the rank that updates it",
    )
    zero_hpz_partition_size: Annotated[int, Integer()] = refused(
        "ranks of a secondary partition (hpZ)",
        default=1,
        why="parameters are sharded once, over all ranks",
        instead="remove it, and give tiers.host_memory so that shards stay resident",
        accepts=(0,),
    )
    zero_quantized_weights: Annotated[bool, Switch()] = _switch_off(
        "gather quantised weights (ZeRO++)", _QUANTISED, "remove it"
    )
    zero_quantized_nontrainable_weights: Annotated[bool, Switch()] = _switch_off(
        "gather quantised frozen weights (ZeRO++)", _QUANTISED, "remove it"
    )
    zero_quantized_gradients: Annotated[bool, Switch()] = _switch_off(
        "reduce quantised gradients (ZeRO++)", _QUANTISED, "remove it"
    )
    zeropp_loco_param: Annotated[Any, Free(nullable=True)] = refused(
        "error feedback of quantised gradients (LoCo)",
        default=None,
        why=_QUANTISED,
        instead="remove it",
    )
    mics_shard_size: Annotated[int, Integer(minimum=-1)] = refused(
        "ranks that hold one copy of the model (MiCS)",
        default=-1,
        why="parameters are sharded over all ranks",
        instead="remove it; state that one node cannot hold is paged to its NVMe",
        accepts=(0,),
    )
    mics_hierarchical_params_gather: Annotated[bool, Switch()] = _switch_off(
        "gather in two levels (MiCS)", "parameters are sharded over all ranks", "remove it"
    )
    memory_efficient_linear: Annotated[bool, Switch()] = no_effect(
        "a linear layer that saves memory", default=True, why="modules are used as they are"
    )
    pipeline_loading_checkpoint: Annotated[bool, Switch()] = no_effect(
        "load modules in a pipeline", default=False, why="loading streams block by block"
    )
    override_module_apply: Annotated[bool, Switch()] = no_effect(
        "gather in nn.Module.apply",
        default=True,
        why="a sharded parameter that is touched gathers itself; nothing is patched",
    )
    log_trace_cache_warnings: Annotated[bool, Switch()] = no_effect(
        "log a changed order of modules", default=False, why="a changed order is normal here"
    )
    enable_sanity_checks: Annotated[bool, Switch()] = no_effect(
        "check what GatheredParameters changed", default=False, why="these checks are always on"
    )
    save_muon_momentum_buffer_in_memory: Annotated[bool, Switch()] = no_effect(
        "keep Muon's momentum on the device",
        default=False,
        why="its state rests where that of other optimizers does",
    )
    leaf_module: LeafModule | None = no_effect(
        "modules whose parameters are gathered together",
        default=None,
        why=_EXPERTS,
    )


__all__ = ["LeafModule", "OffloadOptimizer", "OffloadParam", "ZenFlow", "ZeroOptimization"]
