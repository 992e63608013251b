"""A parsed configuration, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import PrivateAttr

from estimators import AheadLimit, ElementType, Persistence, StateFormat, Tier
from zero.config.autos import UNRESOLVED, WRITTEN
from zero.config.batch import MICRO, TOTAL, BatchTriple, resolve_batch
from zero.config.capabilities import OTHER, SAME, WIDER, Combination, refusals
from zero.config.keys import Standing, facts_of
from zero.config.models import DataTypes, Document, Tiers
from zero.config.param_models import AdamParams, params_section
from zero.config.zero_models import OffloadOptimizer, OffloadParam, ZeroOptimization
from zero.errors import ConfigError
from zero.loss_scaler import DynamicLossScaler, StaticLossScaler
from zero.settings import (
    AioSettings,
    BatchSettings,
    DurableSettings,
    FormatOverride,
    NamedFactory,
    NvmeSettings,
    OffloadSettings,
    Settings,
    TierSettings,
)

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


class ZeroConfig(Document):
    """A configuration whose every key is known; immutable."""

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _source_name: str = PrivateAttr(default="the dict")

    def remember(self, origins: Mapping[str, str], source_name: str) -> None:
        """Keep where the values came from; the loader calls this once."""
        self._origins = dict(origins)
        self._source_name = source_name

    @property
    def origins(self) -> Mapping[str, str]:
        """Where the value of each written or resolved key came from, by its full path."""
        return dict(self._origins)

    @property
    def source_name(self) -> str:
        """The file, or what else the configuration was read from."""
        return self._source_name

    @property
    def zero(self) -> ZeroOptimization:
        """The `zero_optimization` section, or its defaults."""
        return self.zero_optimization or ZeroOptimization()

    @property
    def precision(self) -> str:
        """The type that parameters are trained in: bf16, fp16, fp32, or "model" for its own."""
        if self.bf16 is not None and self.bf16.enabled:
            return "bf16"
        if self.fp16 is not None and self.fp16.enabled:
            return "fp16"
        if self.data_types is not None and self.data_types.param_dtype is not None:
            return self.data_types.param_dtype
        return "model"

    def batch(self, world_size: int) -> BatchTriple:
        """Return the batch triple for a world size; by default micro-batches of 1."""
        given = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        total, micro, steps = given
        is_open = steps is None or {TOTAL, MICRO} & self._origins.keys()
        if total is None and micro is None and is_open:
            return resolve_batch(None, 1, steps, world_size)
        return resolve_batch(*given, world_size)

    def combination(self) -> Combination:
        """Return what this configuration asks to be combined."""
        zero = self.zero
        tiers = self.tiers or Tiers()
        types = self.data_types or DataTypes()
        return Combination(
            stage=str(zero.stage),
            offload_param=(zero.offload_param or OffloadParam()).device,
            offload_optimizer=(zero.offload_optimizer or OffloadOptimizer()).device,
            precision=self.precision,
            optimizer=self.optimizer.type if self.optimizer is not None else "object",
            state_format=tiers.state_format,
            gradients=self._gradient_type(types.grad_accum_dtype),
            collectives=self._same_type(self.communication_data_type),
            directories=("none", "one", "several")[min(2, len(self.nvme_paths()))],
        )

    def _same_type(self, name: str | None) -> str:
        return SAME if name in {None, self.precision} else OTHER

    def _gradient_type(self, name: str | None) -> str:
        same = self._same_type(name)
        return WIDER if same == OTHER and name == "fp32" else same

    def settings(self, world_size: int) -> Settings:
        """Return what the engine works from, or raise ConfigError where it cannot work so."""
        problems = refusals(self.combination()) + self._unresolved()
        try:
            total, micro, steps = self.batch(world_size)
        except ConfigError as error:
            problems.append(str(error))
            total = micro = steps = 1
        if problems:
            raise ConfigError("\n".join(problems))
        zero = self.zero
        aio = self.aio
        return Settings(
            batch=BatchSettings(total, micro, steps),
            element=_ELEMENTS[self.precision],
            stage=zero.stage,
            gradient_clipping=self.gradient_clipping,
            parameter_offload=_offload(zero.offload_param),
            optimizer_offload=_offload(zero.offload_optimizer),
            sub_group_numel=zero.sub_group_size or ZeroOptimization().sub_group_size,
            prefetch_limit=self._ahead_limit("stage3_prefetch_bucket_size"),
            live_limit=self._ahead_limit("stage3_max_live_parameters"),
            reuse_numel=zero.stage3_max_reuse_distance,
            persistence=Persistence(
                zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
            ),
            tiers=self._tier_settings(),
            aio=AioSettings()
            if aio is None
            else AioSettings(aio.engine, aio.block_size, aio.queue_depth, aio.intra_op_parallelism),
            optimizer=self._optimizer_factory(),
            scheduler=self._scheduler_factory(),
            drop_last_batch=self.dataloader_drop_last,
            gradient_element=(ElementType.FP32 if self.combination().gradients == WIDER else None),
            reduction_element=_ELEMENTS[self.communication_data_type or "model"],
            autocasts=self.torch_autocast is not None and self.torch_autocast.enabled,
        )

    def _ahead_limit(self, name: str) -> AheadLimit:
        is_written = self._origins.get(f"zero_optimization.{name}") == WRITTEN
        return AheadLimit(getattr(self.zero, name), is_written=is_written)

    def _unresolved(self) -> list[str]:
        """Return an error for every "auto" that only a framework could have resolved."""
        return [
            f'{path}: "auto" is resolved by a framework such as the Trainer, and none was there; '
            "write a number"
            for path, origin in self._origins.items()
            if origin == UNRESOLVED
        ]

    def nvme_paths(self) -> tuple[NvmeSettings, ...]:
        """Return the directories for swap files, `tiers.nvme` first."""
        if self.tiers is not None and self.tiers.nvme:
            return tuple(
                NvmeSettings(
                    entry.path,
                    entry.capacity,
                    entry.allow_any_file_system,
                    entry.read_bandwidth or entry.write_bandwidth,
                    entry.write_bandwidth or entry.read_bandwidth,
                    entry.weight,
                )
                for entry in self.tiers.nvme
            )
        paths: dict[Path, None] = {}
        for section in (self.zero.offload_optimizer, self.zero.offload_param):
            if section is not None and section.device == "nvme" and section.nvme_path is not None:
                paths[section.nvme_path] = None
        return tuple(NvmeSettings(path) for path in paths)

    def _tier_settings(self) -> TierSettings:
        tiers = self.tiers or Tiers()
        return TierSettings(
            device=tiers.device,
            device_memory_bytes=tiers.device_memory,
            host_memory_bytes=tiers.host_memory,
            nvme=self.nvme_paths(),
            state_format=StateFormat(tiers.state_format),
            update_device=tiers.update_device,
            format_overrides=tuple(
                FormatOverride(each.parameters, StateFormat(each.state_format))
                for each in tiers.state_formats
            ),
            rounding_seed=tiers.rounding_seed,
            measures_bandwidth=tiers.measure_bandwidth,
            slot_count=tiers.slot_count,
            double_backward=tiers.double_backward,
            write_burst=tiers.write_burst,
            measures_schedule=tiers.io_schedule == "measure",
            verify=tiers.verify,
            durable=DurableSettings(**tiers.durable) if tiers.durable else None,
            keep_last_checkpoints=tiers.keep_last_checkpoints,
            checkpoints_as_stored=tiers.checkpoints_as_stored,
        )

    def _scheduler_factory(self) -> NamedFactory | None:
        """Return the schedule with the arguments that were written."""
        if self.scheduler is None:
            return None
        name, params = self.scheduler.type, self.scheduler.params
        section = params_section("scheduler", name)
        if section is None:
            return NamedFactory(name, dict(params))
        filled = section.model_validate(params)
        return NamedFactory(name, {key: getattr(filled, key) for key in filled.model_fields_set})

    def loss_scaler(self) -> StaticLossScaler | DynamicLossScaler:
        """Return a fresh loss scaler as the `fp16` section asks; a scale of 1 where it is off."""
        fp16 = self.fp16
        if fp16 is None or not fp16.enabled:
            return StaticLossScaler()
        if fp16.loss_scale:
            return StaticLossScaler(fp16.loss_scale)
        return DynamicLossScaler(
            init_scale=2.0**fp16.initial_scale_power,
            scale_window=fp16.loss_scale_window,
            min_scale=fp16.min_loss_scale,
            delayed_shift=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
        )

    def _optimizer_factory(self) -> NamedFactory | None:
        if self.optimizer is None:
            return None
        section = params_section("optimizer", self.optimizer.type)
        if section is None:
            return NamedFactory(self.optimizer.type, dict(self.optimizer.params))
        params = section.model_validate(self.optimizer.params)
        if not isinstance(params, AdamParams):
            filled = {
                name: getattr(params, name)
                for name, info in type(params).model_fields.items()
                if facts_of(name, info).standing is Standing.IMPLEMENTED
            }
            return NamedFactory(self.optimizer.type, filled)
        return NamedFactory(
            "AdamW" if params.adam_w_mode else "Adam",
            {
                "lr": params.lr,
                "betas": params.betas,
                "eps": params.eps,
                "weight_decay": params.weight_decay,
                "bias_correction": params.bias_correction,
            },
        )


_ELEMENTS: dict[str, ElementType | None] = {
    "bf16": ElementType.BF16,
    "fp16": ElementType.FP16,
    "fp32": ElementType.FP32,
    "model": None,
}


def _offload(section: OffloadParam | OffloadOptimizer | None) -> OffloadSettings:
    if section is None:
        return OffloadSettings()
    cap = section.max_in_cpu if isinstance(section, OffloadParam) else None
    # Left out it locks nothing: on the CPU no device copies from these pages, and locked ones all
    # count against a budget from the start.
    pins = section.pin_memory and "pin_memory" in section.model_fields_set
    return OffloadSettings(_TIERS[section.device], pins, cap)
