"""The reference page, the schema and the commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zero.config import load_config
from zero.config.__main__ import main
from zero.config.keys import Standing, facts_of
from zero.config.models import Document
from zero.config.other_values import Free
from zero.config.reference import json_schema, reference_page, standings

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "configs"

FIELD_KEYS = """
zero_optimization: stage contiguous_gradients reduce_scatter reduce_bucket_size
    use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm
    load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size
    stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
    legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
    mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
    override_module_apply log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory leaf_module
zero_optimization.offload_param: device nvme_path buffer_count buffer_size max_in_cpu pin_memory
zero_optimization.offload_optimizer: device nvme_path buffer_count pin_memory pipeline_read
    pipeline_write fast_init ratio super_offload cpuadam_cores_perc
zero_optimization.zenflow: topk_ratio select_strategy select_interval update_interval overlap_step
    offload auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch
aio: block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds
fp16: enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
    consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads
bf16: enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
    bf16_optimizer_states
data_types: grad_accum_dtype param_dtype buffer_dtype
torch_autocast: enabled dtype lower_precision_safe_modules
: train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    optimizer scheduler managed_gradient_accumulation communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    steps_per_print wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last
    activation_checkpointing checkpoint flops_profiler monitor tensorboard wandb comet csv_monitor
    comms_logger amp elasticity autotuning data_efficiency curriculum_learning compression_training
    hybrid_engine weight_quantization compile tensor_parallel expert_parallel pipeline
    progressive_layer_drop graph_harvesting timers nebula datastates sequence_parallel_size
    use_data_before_expert_parallelism log_level
activation_checkpointing: partition_activations number_checkpoints contiguous_memory_optimization
    cpu_checkpointing synchronize_checkpoint_boundary profile
optimizer: type params legacy_fusion
scheduler: type params
"""
"""Every key of the field's schema, by section."""


def field_keys() -> list[str]:
    keys, section = [], ""
    for line in FIELD_KEYS.strip().splitlines():
        head, colon, tail = line.partition(":")
        if colon:
            section = f"{head}." if head else ""
        keys += [section + name for name in (tail if colon else line).split()]
    return keys


def test_every_key_of_the_field_is_classified() -> None:
    known = standings()
    keys = field_keys()
    assert len(keys) > 140
    assert [key for key in keys if key not in known] == []


def test_every_key_without_effect_or_refused_says_why() -> None:
    def check(section: type, prefix: str) -> None:
        for name, info in section.model_fields.items():
            facts = facts_of(f"{prefix}{name}", info)
            assert facts.meaning, facts.path
            if facts.standing is Standing.NO_EFFECT:
                assert facts.why, facts.path
            if facts.standing is Standing.REFUSED:
                assert facts.why, facts.path
                assert facts.instead, facts.path
            if facts.section is not None:
                check(facts.section, f"{facts.path}.")
            elif facts.default is not None and not isinstance(facts.kind, Free):
                assert facts.kind.parse(facts.default) == facts.default, facts.path

    check(Document, "")


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run `python -m zero.config docs > docs/configuration.md`"


def test_the_page_names_every_key() -> None:
    page = reference_page()
    for key in field_keys():
        assert f"`{key.rpartition('.')[2]}`" in page


def test_the_schema_is_strict_and_knows_auto() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert all(section["additionalProperties"] is False for section in schema["$defs"].values())
    clipping = schema["properties"]["gradient_clipping"]
    assert clipping["anyOf"] == [{"type": "number", "minimum": 0.0}, {"const": "auto"}]
    assert clipping["standing"] == "implemented"
    overlap = schema["$defs"]["ZeroOptimization"]["properties"]["overlap_comm"]
    assert overlap["standing"] == "no effect"


def test_show_prints_values_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(FILES / "trainer_zero3_nvme.json")
    assert main(["show", path, "--world-size", "4", "--hidden-size", "1000", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    keys = output["keys"]
    assert keys["train_batch_size"] == {
        "value": 4,
        "origin": "derived, world size 4",
        "standing": "implemented",
    }
    assert keys["zero_optimization.reduce_bucket_size"]["value"] == 1_000_000
    assert keys["aio.intra_op_parallelism"] == {
        "value": 1,
        "origin": "written",
        "standing": "implemented",
    }
    assert keys["tiers.nvme"]["value"] == [{"path": "/local_nvme"}]
    assert keys["tiers.host_memory"] == {
        "value": "auto",
        "origin": "default",
        "standing": "implemented",
    }
    assert any("thread_count is an old spelling" in text for text in output["warnings"])

    assert main(["show", path]) == 0
    printed = capsys.readouterr()
    assert "zero_optimization.offload_param.nvme_path" in printed.out
    assert "contiguous_gradients" in printed.out
    assert "legacy_stage1" not in printed.out
    assert "warning: " in printed.err
    assert main(["show", path, "--all"]) == 0
    assert "legacy_stage1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, [4, 4, 1]),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, [12, 4, 3]),
        (
            {
                "train_batch_size": 24,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
            },
            [24, 4, 3],  # two ranks
        ),
        ({}, [1, 1, 1]),
    ],
)
def test_show_fills_in_batch_sizes(
    written: dict[str, int],
    shown: list[int | None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written), encoding="utf-8")
    assert main(["show", str(path), "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [keys[name]["value"] for name in names] == shown


def test_check_tells_all_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", str(FILES / "tiers.json")]) == 0
    assert capsys.readouterr().out.endswith("tiers.json: valid, checked for world size 1\n")
    assert main(["check", str(FILES / "tiers.json"), "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 2
    assert main(["check", str(FILES / "zeropp.json")]) == 1
    assert "zero_quantized_gradients: true is not available" in capsys.readouterr().err
    assert main(["check", str(FILES / "tiers.json"), "--world-size", "3"]) == 1
    assert "train_batch_size must equal" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.json")]) == 1
    assert "does not exist" in capsys.readouterr().err
    path = tmp_path / "many.json"
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    path.write_text(
        json.dumps(batch | {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}})
    )
    assert main(["check", str(path)]) == 0
    assert "checked for world size 8" in capsys.readouterr().out


def test_the_schema_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zero.config", "schema"],
        check=True,
        capture_output=True,
        timeout=120,
        cwd=ROOT,
    )
    assert json.loads(done.stdout) == json_schema()


def test_the_docs_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert capsys.readouterr().out == reference_page()


def test_keys_of_a_disabled_section_are_still_known() -> None:
    assert load_config({"wandb": {"enabled": False, "project": "p"}}).wandb.project == "p"
    with pytest.raises(ValueError, match=r'wandb.projekt: .* did you mean "project"'):
        load_config({"wandb": {"enabled": False, "projekt": "p"}})
