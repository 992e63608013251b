"""The whole configuration as models; `zero.config.load_config` fills them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from zero.config import other_models as other
from zero.config.keys import Auto, Section, key, no_effect, refused
from zero.config.names import OPTIMIZERS
from zero.config.other_values import ByteSize, DurableRun, FolderPath, Free, Parameters, Text
from zero.config.values import Choice, Integer, Number, Switch
from zero.config.zero_models import ZeroOptimization

ELEMENTS = ("fp32", "fp16", "bf16")
_LATER = "it is not in this version"
_SWITCH = Annotated[bool, Switch()]
_FORMATS = ("exact", "fp32", "bf16", "compact")


class NvmePath(Section):
    """One directory for swap files."""

    path: Annotated[Path, FolderPath()] = key("directory on the drive", default=...)
    capacity: Annotated[int | None, ByteSize(nullable=True, auto=True)] = key(
        'most bytes to use there, shared by the ranks of the node; null or "auto" is all that is'
        " free",
        default=None,
        auto=Auto.MACHINE,
    )
    read_bandwidth: Annotated[int | None, ByteSize(nullable=True)] = key(
        "bytes a second that the drive reads; null is as fast as it writes", default=None
    )
    write_bandwidth: Annotated[int | None, ByteSize(nullable=True)] = key(
        "bytes a second that the drive writes; null is as fast as it reads", default=None
    )
    weight: Annotated[float | None, Number(nullable=True, above_minimum=True)] = key(
        "its share of the bytes beside the weights of the other directories; null in all of them"
        " measures their rates instead",
        default=None,
        auto=Auto.MACHINE,
    )
    allow_any_file_system: _SWITCH = key(
        "use the directory even if it lies on a network or memory file system", default=False
    )


class FormatRule(Section):
    """How the state of some parameters is stored."""

    parameters: Annotated[str, Text()] = key(
        "pattern of parameter names, with `*` and `?` as in a shell", default=...
    )
    state_format: Annotated[str, Choice(words=_FORMATS)] = key(
        "how their state is stored", default=...
    )


class Tiers(Section):
    """How much of each tier a node gives (ours; the field has nothing like it)."""

    device: Annotated[str, Choice(words=("auto", "cpu", "cuda"))] = key(
        "where the model computes: auto is a CUDA device where torch finds one, else the processor",
        default="auto",
        auto=Auto.MACHINE,
    )
    device_memory: Annotated[int | None, ByteSize(auto=True)] = key(
        "device memory of the node for state", default=None, auto=Auto.MACHINE
    )
    host_memory: Annotated[int | None, ByteSize(auto=True)] = key(
        "host memory of the node for everything that tierzero allocates, staging included",
        default=None,
        auto=Auto.MACHINE,
    )
    nvme: tuple[NvmePath, ...] = key(
        "directories for swap files, one of each drive; a rank's file is striped over several by"
        " their measured rates, within their capacities",
        default=(),
    )
    slot_count: Annotated[int | None, Integer(nullable=True, minimum=1, maximum=256)] = key(
        "staging buffers of a rank: one is in use, the others are read ahead or written behind;"
        " fewer where the budget is small; null chooses",
        default=None,
    )
    double_backward: _SWITCH = key(
        "plan for backwards with create_graph=True, such as gradient penalties: every unit stays"
        " unsharded from such a backward to the next forward",
        default=False,
    )
    write_burst: Annotated[int, Integer(maximum=256)] = key(
        "sub-groups that are written together, the drive reading in between; up to 1 mixes reads"
        " and writes",
        default=0,
    )
    io_schedule: Annotated[str, Choice(words=("mixed", "measure"))] = key(
        "in which order reads and writes go to the drive: mixed, or whichever of mixed and"
        " alternating bursts moves more in a measurement at start (1 s, on the new swap file)",
        default="mixed",
    )
    measure_bandwidth: _SWITCH = key(
        "measure at start what the drive reads and writes a second (64 MiB, three times), for the"
        " placement and the share of the drive's limit in reports",
        default=False,
    )
    state_format: Annotated[str, Choice(words=_FORMATS)] = key(
        "how state beside a bf16 parameter is stored (with AdamW: exact 10 bytes, fp32 12, both"
        " keep every bit; bf16 6, compact about 3.1, both round); other parameters keep fp32 state",
        default="exact",
    )
    state_formats: tuple[FormatRule, ...] = key(
        "other formats for some parameters; the first pattern that matches decides. Without one,"
        " compact keeps embeddings and parameters of one dimension exact",
        default=(),
    )
    rounding_seed: Annotated[int, Integer(maximum=(1 << 63) - 1)] = key(
        "seed of the random bits that lossy formats round by", default=0
    )
    update_device: Annotated[
        str,
        Choice(
            words=("auto", "cpu", "device"),
            meant=(("gpu", "device"), ("cuda", "device"), ("host", "cpu")),
        ),
    ] = key(
        "where the optimizer runs: device streams state through a GPU, at the speed of its link;"
        " cpu updates in host memory; auto lets both share the sub-groups whose state is offloaded"
        " to cpu while that is measured to be faster, else takes the GPU, unless the host alone is"
        " measured to be much sooner over",
        default="auto",
        auto=Auto.MACHINE,
    )
    durable: Annotated[Any, DurableRun()] = key(
        "keep the run under a name in the directories of tiers.nvme, committed every so many"
        " steps: whatever kills it, zero.initialize resumes at the last commit (docs/durable.md)",
        default=False,
    )
    verify: _SWITCH = key(
        "check at every page-in that NVMe gives back the bytes that were written (xxhash)",
        default=False,
    )
    keep_last_checkpoints: Annotated[int | None, Integer(nullable=True, minimum=1)] = key(
        "checkpoints that stay in a folder when another is saved there; null keeps all",
        default=None,
    )
    checkpoints_as_stored: _SWITCH = key(
        "save moments in the types in which they rest (bf16, 8-bit codes) instead of fp32: smaller"
        " checkpoints with the same values",
        default=False,
    )


class Aio(Section):
    """How transfers are made."""

    engine: Annotated[
        str, Choice(words=("auto", "io_uring", "kernel_aio", "threads", "python"))
    ] = key("which engine moves bytes (ours)", default="auto", auto=Auto.MACHINE)
    block_size: Annotated[int, Integer(minimum=4096, maximum=1 << 30, multiple_of=4096)] = key(
        "bytes of one request", default=1 << 20
    )
    queue_depth: Annotated[int, Integer(minimum=1, maximum=65536)] = key(
        "requests in flight (the field's default is 8)", default=32
    )
    intra_op_parallelism: Annotated[int, Integer(minimum=1, maximum=1024)] = key(
        "threads that transfer (the field's default is 1)", default=4
    )
    single_submit: _SWITCH = no_effect(
        "submit requests one by one",
        default=False,
        why="the engine submits as many as fit its queue",
    )
    overlap_events: _SWITCH = no_effect(
        "submit before all are complete", default=True, why="the queue is always kept full"
    )
    use_gds: _SWITCH = refused(
        "read straight into device memory (GPUDirect Storage)",
        default=False,
        why=_LATER,
        instead="write false",
    )


class Optimizer(Section):
    """The optimizer, by name."""

    type: Annotated[str, Choice(words=OPTIMIZERS, any_case=True)] = key("its name", default=...)
    params: Annotated[Any, Parameters()] = key("its arguments", default={})
    legacy_fusion: _SWITCH = no_effect(
        "the first fused kernel", default=False, why="there is one kernel"
    )


class Scheduler(Section):
    """The schedule of the learning rate, by name."""

    type: Annotated[str, Text(what="the name of a schedule")] = key("its name", default=...)
    params: Annotated[Any, Parameters()] = key("its arguments", default={})


class Fp16(Section):
    """Training in fp16 with a loss scale."""

    enabled: _SWITCH = key("train parameters in fp16", default=False, auto=Auto.FRAMEWORK)
    auto_cast: _SWITCH = no_effect("cast inputs", default=False, why="inputs are used as they are")
    loss_scale: Annotated[float, Number()] = key("static loss scale; 0 is dynamic", default=0.0)
    initial_scale_power: Annotated[int, Integer(maximum=127)] = key(
        "the dynamic scale starts at 2 to this power", default=16
    )
    loss_scale_window: Annotated[int, Integer(minimum=1)] = key(
        "steps without overflow before the scale doubles", default=1000
    )
    hysteresis: Annotated[int, Integer(minimum=1)] = key(
        "overflows before the scale halves", default=2
    )
    consecutive_hysteresis: _SWITCH = key(
        "count anew after every step without overflow", default=False
    )
    min_loss_scale: Annotated[float, Number(above_minimum=True)] = key(
        "smallest dynamic scale", default=1.0
    )
    fp16_master_weights_and_grads: _SWITCH = refused(
        "keep no fp32 master",
        default=False,
        why="masters are exact",
        instead='write "tiers": {"state_format": "exact"} with bf16, 2 bytes less than fp32',
    )


class Bf16(Section):
    """Training in bf16."""

    enabled: _SWITCH = key(
        "train parameters in bf16; else they keep the model's own type",
        default=False,
        auto=Auto.FRAMEWORK,
    )
    immediate_grad_update: _SWITCH = no_effect(
        "add gradients to fp32 ones at once", default=False, why="they are reduced unit by unit"
    )
    check_grad_overflow: _SWITCH = no_effect(
        "look for gradients that are not finite",
        default=True,
        why="they are always looked for",
    )
    bf16_master_weights_and_grads: _SWITCH = refused(
        "keep no fp32 master",
        default=False,
        why="masters are exact",
        instead='write "tiers": {"state_format": "exact"}: residuals of 2 bytes keep every bit',
    )
    bf16_optimizer_states: _SWITCH = refused(
        "keep the moments in bf16",
        default=False,
        why="how state is stored is a key of its own",
        instead='write "tiers": {"state_format": "bf16"}: moments of 2 bytes beside exact masters',
    )


class DataTypes(Section):
    """Types of gradients, parameters and buffers."""

    grad_accum_dtype: Annotated[str | None, Choice(words=ELEMENTS, nullable=True)] = key(
        "type that gradients are accumulated in; null is that of the parameters", default=None
    )
    param_dtype: Annotated[str | None, Choice(words=ELEMENTS, nullable=True)] = key(
        "type of the parameters, in place of fp16.enabled and bf16.enabled", default=None
    )
    buffer_dtype: Annotated[str | None, Choice(words=ELEMENTS, nullable=True)] = refused(
        "type of the buffers",
        default=None,
        why="buffers keep their type",
        instead="cast them yourself",
    )


class TorchAutocast(Section):
    """Mixed precision by torch.autocast."""

    enabled: _SWITCH = key("run forward under torch.autocast", default=False)
    dtype: Annotated[str | None, Choice(words=("bfloat16",), later=("float16",), nullable=True)] = (
        key("type to cast to; null is bfloat16", default=None)
    )
    lower_precision_safe_modules: Annotated[Any, Free()] = refused(
        "modules to cast",
        default=None,
        why="torch decides by the operation",
        instead="remove it",
    )


def _batch(meaning: str) -> Any:
    return key(meaning, default=None, auto=Auto.BATCH)


def _unsupported(meaning: str, why: str, instead: str = "remove it", *, default: Any) -> Any:
    return refused(meaning, default=default, why=why, instead=instead)


class Document(Section):
    """The keys of the top level."""

    train_batch_size: Annotated[int | None, Integer(minimum=1, nullable=True)] = _batch(
        "samples of one optimizer step: micro-batch x accumulation x ranks"
    )
    train_micro_batch_size_per_gpu: Annotated[int | None, Integer(minimum=1, nullable=True)] = (
        _batch("samples of one forward of one rank")
    )
    gradient_accumulation_steps: Annotated[int | None, Integer(minimum=1, nullable=True)] = _batch(
        "forwards of one optimizer step"
    )
    gradient_clipping: Annotated[float, Number()] = key(
        "largest global norm of the gradient; 0 switches clipping off",
        default=1.0,
        auto=Auto.FRAMEWORK,
    )
    optimizer: Optimizer | None = key(
        "the optimizer, where none is given as an object", default=None
    )
    scheduler: Scheduler | None = key(
        "the schedule, where none is given as an object", default=None
    )
    zero_optimization: ZeroOptimization | None = key("ZeRO", default=None)
    tiers: Tiers | None = key("how much of each tier a node gives (ours)", default=None)
    aio: Aio | None = key("how transfers are made", default=None)
    fp16: Fp16 | None = key("training in fp16", default=None)
    bf16: Bf16 | None = key("training in bf16", default=None)
    data_types: DataTypes | None = key("types of gradients and parameters", default=None)
    torch_autocast: TorchAutocast | None = key("torch.autocast", default=None)
    dataloader_drop_last: _SWITCH = key("drop the last, smaller batch of an epoch", default=False)
    managed_gradient_accumulation: _SWITCH = _unsupported(
        "the engine counts micro-batches",
        "the engine always counts them",
        "write true",
        default=True,
    )
    communication_data_type: Annotated[str | None, Choice(words=ELEMENTS, nullable=True)] = key(
        "type in which several ranks add up and average gradients; null is the one that they"
        " accumulate in",
        default=None,
    )
    seq_parallel_communication_data_type: Annotated[
        str | None, Choice(words=ELEMENTS, nullable=True)
    ] = no_effect("type of sequence-parallel collectives", default="fp32", why="there are none")
    prescale_gradients: _SWITCH = _unsupported(
        "divide before the reduction",
        "gradients are summed over the ranks, then divided",
        'remove it; where sums overflow, write "communication_data_type": "fp32"',
        default=False,
    )
    gradient_predivide_factor: Annotated[float, Number(above_minimum=True)] = _unsupported(
        "divide before the reduction",
        "gradients are summed over the ranks, then divided",
        'remove it; where sums overflow, write "communication_data_type": "fp32"',
        default=1.0,
    )
    gradient_allreduce_op: Annotated[str, Choice(words=("mean", "sum"))] = _unsupported(
        "how gradients are reduced",
        "they are averaged",
        "scale the loss yourself",
        default="mean",
    )
    sparse_gradients: _SWITCH = _unsupported(
        "reduce gradients of embeddings as sparse", "gradients are dense", default=False
    )
    zero_allow_untested_optimizer: _SWITCH = no_effect(
        "allow any optimizer",
        default=False,
        why="what is supported is decided by the optimizer itself",
    )
    zero_force_ds_cpu_optimizer: _SWITCH = no_effect(
        "demand the field's CPU optimizer", default=True, why="the update has kernels of its own"
    )
    steps_per_print: Annotated[int | None, Integer(minimum=1, nullable=True, infinite=True)] = (
        no_effect(
            "steps between two lines of progress", default=None, why="the engine prints nothing"
        )
    )
    wall_clock_breakdown: _SWITCH = no_effect(
        "print times", default=False, why="the engine prints nothing; the ledger has the waits"
    )
    memory_breakdown: _SWITCH = no_effect(
        "print memory", default=False, why="the engine prints nothing; see engine.memory_report()"
    )
    dump_state: _SWITCH = no_effect(
        "print the configuration", default=False, why="`python -m zero.config show FILE` prints it"
    )
    log_level: Annotated[str | None, Text(nullable=True)] = no_effect(
        "level of the log", default=None, why='logging.getLogger("zero").setLevel() sets it'
    )
    activation_checkpointing: other.ActivationCheckpointing | None = key(
        "the field's own activation checkpointing", default=None
    )
    checkpoint: other.Checkpoint | None = key("how checkpoints are written and read", default=None)
    flops_profiler: other.FlopsProfiler | None = key("count of operations", default=None)
    tensorboard: other.TensorBoard | None = key("metrics for TensorBoard", default=None)
    wandb: other.Wandb | None = key("metrics for Weights & Biases", default=None)
    comet: other.Comet | None = key("metrics for Comet", default=None)
    csv_monitor: other.CsvMonitor | None = key("metrics in CSV files", default=None)
    comms_logger: other.CommsLogger | None = key("log of the collectives", default=None)
    amp: other.Amp | None = key("mixed precision by apex", default=None)
    elasticity: other.Elasticity | None = key("batch sizes for many world sizes", default=None)
    autotuning: other.Autotuning | None = key("search for settings", default=None)
    data_efficiency: other.DataEfficiency | None = key("sampling of data", default=None)
    curriculum_learning: other.CurriculumLearning | None = key("growing sequences", default=None)
    progressive_layer_drop: other.ProgressiveLayerDrop | None = key("dropped layers", default=None)
    hybrid_engine: other.HybridEngine | None = key("training and generation", default=None)
    nebula: other.Nebula | None = key("a checkpoint service", default=None)
    compile: other.Compile | None = key("compiler of the engine", default=None)
    compression_training: Annotated[Any, Free()] = _unsupported(
        "pruning and quantisation",
        "modules are used as they are",
        "compress afterwards",
        default=None,
    )
    weight_quantization: Annotated[Any, Free()] = _unsupported(
        "quantised weights", "parameters keep every bit", default=None
    )
    tensor_parallel: Annotated[Any, Free()] = _unsupported(
        "tensor parallelism", "every rank runs the whole model", "use ZeRO-3 alone", default=None
    )
    expert_parallel: Annotated[Any, Free()] = _unsupported(
        "expert parallelism", "experts are sharded and paged like any module", default=None
    )
    pipeline: Annotated[Any, Free()] = _unsupported(
        "pipeline parallelism", "every rank runs the whole model", "use ZeRO-3 alone", default=None
    )
    sequence_parallel_size: Annotated[int, Integer(minimum=1)] = _unsupported(
        "ranks of one sequence", "every rank has sequences of its own", "write 1", default=1
    )
    use_data_before_expert_parallelism: _SWITCH = no_effect(
        "order of the ranks", default=False, why="there are no expert-parallel ranks"
    )
    graph_harvesting: _SWITCH = no_effect(
        "reuse CUDA graphs", default=False, why="units are gathered by hooks, outside any graph"
    )
    timers: Annotated[Any, Free()] = no_effect(
        "details of wall_clock_breakdown", default=None, why="the engine prints nothing"
    )
    datastates: Annotated[Any, Free()] = _unsupported(
        "a checkpoint engine",
        "save_checkpoint(blocking=False) copies while training goes on",
        default=None,
    )
    monitor: Annotated[Any, Free()] = _unsupported(
        "metrics",
        "each writer has a section of its own",
        "write tensorboard, wandb, comet or csv_monitor",
        default=None,
    )
