"""Sections of the field's schema that this version only recognises: each is off, or refused."""

from __future__ import annotations

from typing import Annotated, Any

from zero.config.keys import Section, detail, no_effect, refused
from zero.config.other_values import Free
from zero.config.values import Choice, Integer, Switch

_NO_MONITOR = "this version writes no monitor files; engine.memory_report() has the numbers"

Anything = Annotated[Any, Free()]


def _monitor() -> Any:
    return no_effect("write metrics", default=False, why=_NO_MONITOR)


def _off(what: str, why: str, instead: str) -> Any:
    return refused(what, default=False, why=why, instead=instead)


class TensorBoard(Section):
    """Metrics for TensorBoard."""

    enabled: Annotated[bool, Switch()] = _monitor()
    output_path: Anything = detail("folder of the files", default="")
    job_name: Anything = detail("name of the run", default="")


class Wandb(Section):
    """Metrics for Weights & Biases."""

    enabled: Annotated[bool, Switch()] = _monitor()
    group: Anything = detail("group of the run", default=None)
    team: Anything = detail("team of the run", default=None)
    project: Anything = detail("project of the run", default="")


class Comet(Section):
    """Metrics for Comet."""

    enabled: Annotated[bool, Switch()] = _monitor()
    samples_log_interval: Anything = detail("samples between two entries", default=100)
    project: Anything = detail("project of the run", default=None)
    workspace: Anything = detail("workspace of the run", default=None)
    api_key: Anything = detail("key of the service", default=None)
    experiment_name: Anything = detail("name of the run", default=None)
    experiment_key: Anything = detail("key of the run", default=None)
    online: Anything = detail("send at once", default=None)
    mode: Anything = detail("make or continue a run", default=None)


class CsvMonitor(Section):
    """Metrics in CSV files."""

    enabled: Annotated[bool, Switch()] = _monitor()
    output_path: Anything = detail("folder of the files", default="")
    job_name: Anything = detail("name of the run", default="")


class FlopsProfiler(Section):
    """Count of floating point operations."""

    enabled: Annotated[bool, Switch()] = no_effect(
        "profile",
        default=False,
        why="this version has no profiler; torch.profiler sees the same modules",
    )
    recompute_fwd_factor: Anything = detail("cost of recomputation", default=0.0)
    profile_step: Anything = detail("step to profile", default=1)
    module_depth: Anything = detail("depth to print", default=-1)
    top_modules: Anything = detail("modules to print", default=1)
    detailed: Anything = detail("print all modules", default=True)
    output_file: Anything = detail("file to print to", default=None)


class CommsLogger(Section):
    """Log of the collectives."""

    enabled: Annotated[bool, Switch()] = no_effect(
        "log collectives", default=False, why="this version does not log them; torch.profiler does"
    )
    verbose: Anything = detail("log each at once", default=False)
    prof_all: Anything = detail("log all kinds", default=True)
    debug: Anything = detail("log the caller", default=False)
    prof_ops: Anything = detail("kinds to log", default=[])


class Amp(Section):
    """Mixed precision by NVIDIA apex."""

    enabled: Annotated[bool, Switch()] = _off(
        "use apex.amp", "apex is not used", 'write "bf16": {"enabled": true}'
    )
    opt_level: Anything = detail("level of apex.amp", default="O1")
    loss_scale: Anything = detail("loss scale of apex.amp", default="dynamic")


class Elasticity(Section):
    """Batch sizes for a changing number of ranks."""

    enabled: Annotated[bool, Switch()] = _off(
        "choose batch sizes for many world sizes",
        "batch sizes are never changed behind your back",
        "give two of the three batch sizes",
    )
    max_train_batch_size: Anything = detail("largest batch", default=2000)
    micro_batch_sizes: Anything = detail("micro-batches to try", default=[2, 4, 6])
    min_gpus: Anything = detail("fewest ranks", default=1)
    max_gpus: Anything = detail("most ranks", default=10000)
    min_time: Anything = detail("least minutes of a run", default=0)
    version: Anything = detail("version of the rule", default=0.2)
    prefer_larger_batch: Anything = detail("prefer the larger batch", default=True)
    ignore_non_elastic_batch_info: Anything = detail("ignore the batch sizes", default=False)
    num_gpus_per_node: Anything = detail("ranks of a node", default=1)
    model_parallel_size: Anything = detail("ranks of a model", default=1)


class Autotuning(Section):
    """Search for good settings by short runs."""

    enabled: Annotated[bool, Switch()] = _off(
        "search for settings", "sizes are computed from the budgets", "remove it"
    )
    fast: Anything = detail("search less", default=True)
    results_dir: Anything = detail("folder of results", default="autotuning_results")
    exps_dir: Anything = detail("folder of runs", default="autotuning_exps")
    overwrite: Anything = detail("overwrite results", default=True)
    metric: Anything = detail("what to maximise", default="throughput")
    start_profile_step: Anything = detail("first measured step", default=3)
    end_profile_step: Anything = detail("last measured step", default=5)
    tuner_type: Anything = detail("how to search", default="gridsearch")
    tuner_early_stopping: Anything = detail("runs without gain", default=5)
    tuner_num_trials: Anything = detail("most runs", default=50)
    arg_mappings: Anything = detail("arguments of the program", default=None)
    mp_size: Anything = detail("ranks of a model", default=1)
    model_info: Anything = detail("facts about the model", default=None)
    max_train_batch_size: Anything = detail("largest batch", default=None)
    min_train_batch_size: Anything = detail("smallest batch", default=1)
    max_train_micro_batch_size_per_gpu: Anything = detail("largest micro-batch", default=1024)
    min_train_micro_batch_size_per_gpu: Anything = detail("smallest micro-batch", default=1)
    num_tuning_micro_batch_sizes: Anything = detail("micro-batches to try", default=3)


class DataEfficiency(Section):
    """Sampling and routing of data."""

    enabled: Annotated[bool, Switch()] = _off(
        "sample or drop data",
        "the data that you give are the data that are trained on",
        "do it in your dataset",
    )
    seed: Anything = detail("seed of the sampling", default=1234)
    data_sampling: Anything = detail("curriculum", default=None)
    data_routing: Anything = detail("random token dropping", default=None)


class CurriculumLearning(Section):
    """Sequence lengths that grow."""

    enabled: Annotated[bool, Switch()] = _off(
        "let sequences grow", "inputs are never cut", "do it in your dataset"
    )
    curriculum_type: Anything = detail("what grows", default="seqlen")
    min_difficulty: Anything = detail("start", default=None)
    max_difficulty: Anything = detail("end", default=None)
    schedule_type: Anything = detail("how it grows", default="fixed_linear")
    schedule_config: Anything = detail("details of the growth", default=None)


class ProgressiveLayerDrop(Section):
    """Layers dropped at random."""

    enabled: Annotated[bool, Switch()] = _off(
        "drop layers", "modules are used as they are", "do it in your model"
    )
    theta: Anything = detail("share of layers kept", default=1.0)
    gamma: Anything = detail("speed of the change", default=0.001)


class HybridEngine(Section):
    """Training and generation in one engine."""

    enabled: Annotated[bool, Switch()] = _off(
        "use kernels for generation", "it has none of its own", "generate with the module itself"
    )
    max_out_tokens: Anything = detail("tokens to generate", default=512)
    inference_tp_size: Anything = detail("ranks of a generation", default=1)
    release_inference_cache: Anything = detail("free the cache", default=False)
    pin_parameters: Anything = detail("keep parameters", default=True)
    tp_gather_partition_size: Anything = detail("parameters gathered at once", default=8)


class Nebula(Section):
    """A checkpoint service."""

    enabled: Annotated[bool, Switch()] = _off(
        "save to the service", "it is not supported", "remove it"
    )
    persistent_storage_path: Anything = detail("folder", default=None)
    persistent_time_interval: Anything = detail("seconds between saves", default=100)
    num_of_version_in_retention: Anything = detail("versions kept", default=2)
    enable_nebula_load: Anything = detail("load from the service", default=True)
    load_path: Anything = detail("folder to load from", default=None)


class Compile(Section):
    """Compiler of the engine."""

    deepcompile: Annotated[bool, Switch()] = _off(
        "compile ZeRO into the graph",
        "units are gathered by hooks",
        "compile what is inside of them: block.forward = torch.compile(block.forward)",
    )
    free_activation: Anything = detail("free activations", default=False)
    free_activation_threshold: Anything = detail("bytes of such an activation", default=10485760)
    offload_activation: Anything = detail("offload activations", default=False)
    offload_opt_states: Anything = detail("offload state", default=False)
    offload_parameters: Anything = detail("offload parameters", default=False)
    double_buffer: Anything = detail("two buffers", default=True)
    symmetric_memory: Anything = detail("symmetric memory", default=False)
    debug_log: Anything = detail("log", default=False)
    sync_before_reduce: Anything = detail("wait before a reduction", default=False)
    sync_after_reduce: Anything = detail("wait after a reduction", default=False)
    sync_before_allgather: Anything = detail("wait before a gather", default=False)
    sync_after_allgather: Anything = detail("wait after a gather", default=False)
    keep_int_input_tensors: Anything = detail("keep integer inputs", default=True)
    keep_all_input_tensors: Anything = detail("keep inputs", default=False)
    passes: Anything = detail("passes of the compiler", default=None)


class CheckpointWriter(Section):
    """How the field's checkpoints are written."""

    type: Anything = detail("kind of writer", default=None)
    decoupled: Anything = detail("another process", default=False)
    io_buffer_size: Anything = detail("bytes of a buffer", default=67108864)
    io_buffer_double: Anything = detail("two buffers", default=True)
    io_multiplier: Anything = detail("writers of a node", default=1)
    show_statistics: Anything = detail("print times", default=False)
    data_parallel: Anything = detail("who writes", default=None)


class ParallelWrite(Section):
    """Who writes checkpoints."""

    pipeline_stage: Anything = detail("all stages write", default=False)


class Checkpoint(Section):
    """How checkpoints are written and read."""

    tag_validation: Annotated[str, Choice(words=("Warn", "Ignore", "Fail"), any_case=True)] = (
        no_effect(
            "compare tags over the ranks",
            default="Warn",
            why="ranks that name different tags are always refused",
        )
    )
    load_universal: Annotated[bool, Switch()] = refused(
        "read a universal checkpoint",
        default=False,
        why="every checkpoint of ours loads at any world size",
        instead="remove it",
    )
    use_node_local_storage: Annotated[bool, Switch()] = no_effect(
        "every node saves",
        default=False,
        why="all ranks write into one folder that all of them see",
    )
    parallel_write: ParallelWrite | None = no_effect(
        "who writes", default=None, why="every rank writes what it has"
    )
    checkpoint_serialization: Annotated[bool, Switch()] = no_effect(
        "write by torch.save", default=True, why="files are safetensors, without pickle"
    )
    writer: CheckpointWriter | None = no_effect(
        "how files are written", default=None, why="the I/O engine writes them, with direct I/O"
    )


class ActivationCheckpointing(Section):
    """The field's own activation checkpointing."""

    partition_activations: Annotated[bool, Switch()] = no_effect(
        "shard activations",
        default=False,
        why="activations are checkpointed by torch.utils.checkpoint",
    )
    number_checkpoints: Annotated[int | None, Integer(nullable=True)] = no_effect(
        "checkpoints", default=None, why="activations are checkpointed by torch.utils.checkpoint"
    )
    contiguous_memory_optimization: Annotated[bool, Switch()] = no_effect(
        "one buffer", default=False, why="activations are checkpointed by torch.utils.checkpoint"
    )
    cpu_checkpointing: Annotated[bool, Switch()] = no_effect(
        "offload checkpoints",
        default=False,
        why="activations stay on the device; torch.autograd.graph.save_on_cpu moves them",
    )
    synchronize_checkpoint_boundary: Annotated[bool, Switch()] = no_effect(
        "wait at boundaries",
        default=False,
        why="activations are checkpointed by torch.utils.checkpoint",
    )
    profile: Annotated[bool, Switch()] = no_effect(
        "time checkpoints",
        default=False,
        why="activations are checkpointed by torch.utils.checkpoint",
    )
