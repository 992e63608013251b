"""Configuration files in the shapes that tutorials and frameworks use: what each one means."""

import json
import warnings
from pathlib import Path

import pytest

from estimators import ElementType, StateFormat, Tier
from zero.config import ConfigError, ConfigWarning, ZeroConfig, load_config
from zero.config.effective import effective_rows
from zero.settings import NvmeSettings, Settings

FILES = Path(__file__).parent / "configs"
NVME = (NvmeSettings(Path("/local_nvme")),)
ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}


def load(name: str, **arguments) -> ZeroConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return load_config(FILES / f"{name}.json", **arguments)


def summary(settings: Settings) -> dict:
    """Return the settings under short names."""
    optimizer, scheduler = settings.optimizer, settings.scheduler
    return {
        "stage": settings.stage,
        "batch": tuple(
            getattr(settings.batch, name)
            for name in ("train_batch_size", "micro_batch_size", "accumulation_steps")
        ),
        "element": settings.element,
        "clip": settings.gradient_clipping,
        "param": settings.parameter_offload.tier,
        "optim": settings.optimizer_offload.tier,
        "sub_group": settings.sub_group_numel,
        "host": settings.tiers.host_memory_bytes,
        "device": settings.tiers.device_memory_bytes,
        "nvme": settings.tiers.nvme,
        "format": settings.tiers.state_format,
        "aio": (
            settings.aio.engine,
            settings.aio.block_bytes,
            settings.aio.queue_depth,
            settings.aio.thread_count,
        ),
        "optimizer": None if optimizer is None else dict(optimizer.parameters),
        "scheduler": None
        if scheduler is None
        else {"type": scheduler.type_name} | dict(scheduler.parameters),
        "drop_last": settings.drop_last_batch,
    }


PLAIN = {
    "stage": 3,
    "batch": (1, 1, 1),
    "element": None,
    "clip": 1.0,
    "param": Tier.DEVICE,
    "optim": Tier.DEVICE,
    "sub_group": 1_000_000_000,
    "host": None,
    "device": None,
    "nvme": (),
    "format": StateFormat.EXACT,
    "aio": ("auto", 1 << 20, 32, 4),
    "optimizer": None,
    "scheduler": None,
    "drop_last": False,
}
BF16 = {"element": ElementType.BF16}
HOST = {"param": Tier.HOST, "optim": Tier.HOST}

RUNS = {
    "zero_offload_legacy": (1, {"element": ElementType.FP16, "batch": (10, 10, 1)} | HOST),
    "trainer_zero3_auto": (1, {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR"}}),
    "trainer_zero3_cpu": (1, BF16 | HOST | {"optimizer": ADAMW}),
    "trainer_zero3_nvme": (
        1,
        BF16
        | {"param": Tier.NVME, "optim": Tier.NVME, "nvme": NVME, "aio": ("auto", 262144, 32, 1)},
    ),
    "trainer_decay_literals": (
        2,
        BF16
        | {
            "batch": (32, 4, 4),
            "clip": 0.5,
            "optim": Tier.HOST,
            "optimizer": ADAMW | {"lr": 3e-5, "betas": (0.8, 0.999), "weight_decay": 3e-7},
            "scheduler": {
                "type": "WarmupDecayLR",
                "last_batch_iteration": -1,
                "total_num_steps": 10000,
                "warmup_min_lr": 0.0,
                "warmup_max_lr": 3e-5,
                "warmup_num_steps": 500,
            },
        },
    ),
    "accelerate_zero3": (1, BF16),
    "accelerate_zero3_none_path": (2, BF16 | HOST | {"batch": (32, 2, 8)}),
    "cifar": (
        4,
        {
            "batch": (16, 4, 1),
            "optimizer": ADAMW | {"betas": (0.8, 0.999), "weight_decay": 3e-7},
            "scheduler": {
                "type": "WarmupLR",
                "warmup_min_lr": 0.0,
                "warmup_max_lr": 0.001,
                "warmup_num_steps": 1000,
            },
        },
    ),
    "megatron_zero_infinity": (
        8,
        BF16
        | {
            "batch": (128, 4, 4),
            "param": Tier.NVME,
            "optim": Tier.NVME,
            "nvme": NVME,
            "aio": ("auto", 1048576, 16, 2),
        },
    ),
    "webui_nvme_inference": (
        1,
        BF16
        | {
            "param": Tier.NVME,
            "sub_group": 100_000_000,
            "nvme": (NvmeSettings(Path("/mnt/nvme0")),),
            "aio": ("auto", 262144, 32, 1),
        },
    ),
    "l2_adam": (8, {"batch": (8, 1, 1), "optimizer": ADAMW | {"lr": 1e-3, "weight_decay": 0.1}}),
    "llama_factory_z3": (1, {}),
    "axolotl_zero3_bf16": (1, BF16 | HOST),
    "openrlhf": (8, BF16 | {"batch": (128, 2, 8), "optim": Tier.HOST}),
    "lightning_stage3_offload": (
        1,
        BF16 | HOST | {"clip": 0.0, "sub_group": 10**12, "aio": ("auto", 1048576, 8, 1)},
    ),
    "one_cycle": (
        1,
        {
            "batch": (64, 64, 1),
            "optimizer": ADAMW | {"lr": 1e-4},
            "scheduler": {
                "type": "OneCycle",
                "cycle_first_step_size": 1000,
                "cycle_first_stair_count": 500,
                "cycle_second_step_size": 1000,
                "cycle_second_stair_count": 500,
                "decay_step_size": 1000,
                "cycle_min_lr": 0.0001,
                "cycle_max_lr": 0.001,
                "decay_lr_rate": 0.001,
                "cycle_min_mom": 0.85,
                "cycle_max_mom": 0.99,
                "decay_mom_rate": 0.0,
            },
        },
    ),
    "lr_range_test": (
        1,
        {
            "batch": (4, 4, 1),
            "optimizer": ADAMW,
            "scheduler": {
                "type": "LRRangeTest",
                "lr_range_test_min_lr": 0.0001,
                "lr_range_test_step_size": 200,
                "lr_range_test_step_rate": 5.0,
                "lr_range_test_staircase": False,
            },
        },
    ),
    "monitored": (2, BF16 | {"batch": (16, 8, 1)}),
    "tiers": (
        2,
        BF16
        | {
            "batch": (32, 8, 2),
            "param": Tier.NVME,
            "optim": Tier.NVME,
            "device": 40 << 30,
            "host": 8 * 10**9,
            "nvme": (NvmeSettings(Path("/nvme0"), 500 * 10**9),),
            "format": StateFormat.FP32,
            "aio": ("threads", 1 << 20, 32, 8),
            "optimizer": ADAMW | {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        },
    ),
    "fp32_torch_schedule": (
        3,
        {
            "batch": (12, 2, 2),
            "element": ElementType.FP32,
            "optim": Tier.NVME,
            "nvme": (NvmeSettings(Path("~/swap").expanduser()),),
            "optimizer": ADAMW | {"lr": 0.002},
            "scheduler": {"type": "CosineAnnealingLR", "T_max": 100, "eta_min": 1e-6},
        },
    ),
    "trainer_zero2": (1, {"stage": 2}),
    "trainer_zero2_cpu": (
        1,
        {
            "stage": 2,
            "optim": Tier.HOST,
            "optimizer": ADAMW | {"weight_decay": 0.0},
            "scheduler": {"type": "WarmupLR"},
        },
    ),
    "trainer_zero1": (
        1,
        {
            "stage": 1,
            "batch": (64, 64, 1),
            "optimizer": ADAMW | {"lr": 3e-05, "betas": (0.8, 0.999), "weight_decay": 3e-07},
        },
    ),
    "trainer_zero0": (1, {"stage": 0}),
    "accelerate_questionnaire": (1, BF16 | {"stage": 0}),
    "getting_started": (
        1,
        {
            "stage": 1,
            "batch": (8, 8, 1),
            "element": ElementType.FP16,
            "optimizer": ADAMW | {"lr": 0.00015},
        },
    ),
    "llama_factory_z2_offload": (1, {"stage": 2, "optim": Tier.HOST}),
    "bert_lamb": (
        1,
        {
            "element": ElementType.FP16,
            "batch": (4096, 64, 64),
            "stage": 0,
            "optimizer": {
                "lr": 6e-3,
                "betas": (0.9, 0.99),
                "eps": 1e-8,
                "weight_decay": 0.01,
                "bias_correction": True,
                "max_coeff": 0.5,
                "min_coeff": 0.08,
                "eps_inside_sqrt": False,
            },
        },
    ),
    "bfloat16_alias": (2, BF16 | {"batch": (8, 4, 1), "clip": 0.0, "drop_last": True}),
}
"""Files that this version runs: world size, and what differs from PLAIN."""

PARSES = {
    "accelerate_zero3_dummies": (
        {"fp16.enabled": True, "scheduler.params.total_num_steps": "auto"},
        ["scheduler.params.total_num_steps"],
    ),
    "alpaca_offload": (
        {"scheduler.params.total_num_steps": "auto", "bf16.enabled": False},
        ["scheduler.params.total_num_steps"],
    ),
}
"""Files that parse and that this version does not run: effective values, keys of the refusal."""

REFUSED = {
    "zeropp": [
        "zero_optimization.zero_hpz_partition_size: 16 is not available",
        "zero_optimization.zero_quantized_weights: true is not available",
        "zero_optimization.zero_quantized_gradients: true is not available",
    ],
    "trainer_zero3_nvme_misplaced_aio": ["zero_optimization.aio: unknown key", "belongs at aio"],
}
"""Files with a key that is refused, or that stands where nobody would read it."""


def test_there_are_thirty_files_and_each_is_asserted() -> None:
    names = {path.stem for path in FILES.glob("*.json")}
    assert names == RUNS.keys() | PARSES.keys() | REFUSED.keys()
    assert len(RUNS) + len(PARSES) >= 30


@pytest.mark.parametrize("name", RUNS)
def test_file_runs(name: str) -> None:
    world_size, different = RUNS[name]
    assert summary(load(name).settings(world_size)) == PLAIN | different


@pytest.mark.parametrize("name", PARSES)
def test_file_parses_and_says_why_it_does_not_run(name: str) -> None:
    values, keys = PARSES[name]
    config = load(name)
    rows = {row.path: row.value for row in effective_rows(config)}
    assert {path: rows[path] for path in values} == values
    with pytest.raises(ConfigError) as caught:
        config.settings(1)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == keys
    assert all("; " in line for line in lines)


@pytest.mark.parametrize("name", REFUSED)
def test_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    for text in REFUSED[name]:
        assert text in str(caught.value)


def test_hidden_size_and_framework_fill_auto() -> None:
    supplied = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 16,
        "bf16.enabled": True,
        "optimizer.params.lr": 5e-5,
        "scheduler.params.warmup_max_lr": 5e-5,
        "scheduler.params.warmup_num_steps": 30,
        "zero_optimization.stage": 1,  # not "auto" in the file: never overwritten
    }
    config = load("trainer_zero3_auto", hidden_size=100, supplied=supplied)
    settings = summary(config.settings(2))
    assert settings["batch"] == (16, 4, 2)
    assert settings["element"] is ElementType.BF16
    assert settings["optimizer"] == ADAMW | {"lr": 5e-5}
    assert settings["scheduler"] == {
        "type": "WarmupLR",
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 30,
    }
    zero = config.zero
    assert zero.stage == 3
    assert zero.reduce_bucket_size == 10_000
    assert zero.stage3_prefetch_bucket_size == 9_000
    assert zero.stage3_param_persistence_threshold == 1_000
    origins = config.origins
    assert origins["zero_optimization.reduce_bucket_size"] == '"auto": hidden size 100'
    assert origins["bf16.enabled"] == '"auto": supplied by the framework'
    assert origins["fp16.enabled"] == '"auto": default, no framework gave it'
    assert origins["zero_optimization.stage"] == "written"


def test_old_spellings_warn_with_the_new_one() -> None:
    with pytest.warns(ConfigWarning) as caught:
        load_config(FILES / "zero_offload_legacy.json")
    texts = "\n".join(str(entry.message) for entry in caught)
    for old, new in (
        ("cpu_offload", 'zero_optimization.offload_optimizer: {"device": "cpu"}'),
        ("cpu_offload_params", 'zero_optimization.offload_param: {"device": "cpu"}'),
        ("cpu_offload_use_pin_memory", "pin_memory in offload_optimizer and offload_param"),
        (
            "stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ):
        assert f"zero_optimization.{old} is an old spelling; write {new}" in texts


def test_keys_without_effect_warn_once_with_the_reason() -> None:
    with pytest.warns(ConfigWarning) as caught:
        load_config(FILES / "cifar.json")
    (entry,) = caught
    text = str(entry.message)
    assert text.startswith(f"{FILES / 'cifar.json'}: without effect here: ")
    assert "zero_optimization.overlap_comm (the runtime orders it by itself)" in text
    assert "steps_per_print (the engine prints nothing)" in text
    assert "wall_clock_breakdown" not in text  # false says what happens anyway


def test_files_are_json() -> None:
    for path in FILES.glob("*.json"):
        json.loads(path.read_text())
