"""Strict parsing: what is accepted, and that every refusal names key, value and fix."""

import base64
import json
import math
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

from estimators import ElementType, Tier
from zero.config import ConfigError, ConfigWarning, hidden_size_of, load_config, resolve_batch
from zero.config.source import parse_text

STAGE_3 = {"zero_optimization": {"stage": 3}}


def refusal(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (
            {"gradient_clipp1ng": 1},
            'gradient_clipp1ng: unknown key with the value 1; did you mean "gradient_clipping"?',
        ),
        (
            {"bf_16": {"enable": True}},
            'bf_16: unknown key with the value {"enable": true}; did you mean "bf16"?',
        ),
        ({"bf16": {"enable": True}}, "bf16.enable: unknown key with the value true; did you mean"),
        (
            {"aio": {"thread_cnt": 4}},
            'aio.thread_cnt: unknown key with the value 4; did you mean "intra_op_parallelism"?',
        ),
        (
            {"zero_optimization": {"cpu_ofload": True}},
            "zero_optimization.cpu_ofload: unknown key with the value true; did you mean "
            '"offload_optimizer"?',
        ),
        (
            {"stage": 3},
            "stage: unknown key with the value 3; it belongs at zero_optimization.stage",
        ),
        (
            {"aio": {"zzz": 1}},
            "aio.zzz: unknown key with the value 1; remove it; the keys here are engine, ",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm: unknown key with the value 1.0; write "
            '"gradient_clipping" at the top level',
        ),
        (
            {"tiers": {"nvme": [{"path": "/a"}, {"path": "/b", "capcity": 5}]}},
            'tiers.nvme[1].capcity: unknown key with the value 5; did you mean "capacity"?',
        ),
        ({"tiers": {"nvme": [{}]}}, "tiers.nvme[0].path: is missing; write the path of a"),
        ({"tiers": {"nvme": "/a"}}, 'tiers.nvme: must be a list, got "/a"; write [{...}]'),
        ({"bf16": True}, 'bf16: must be an object, got true; write {"enabled": ...}'),
        (
            {"bf16": {"enabled": "true"}},
            'bf16.enabled: must be true or false, got "true"; write true without quotes',
        ),
        ({"bf16": {"enabled": 1}}, "bf16.enabled: must be true or false, got 1; write true"),
        (
            {"train_batch_size": "32"},
            'train_batch_size: must be an integer of at least 1, got "32"; write 32 without',
        ),
        ({"train_batch_size": 0}, "train_batch_size: must be an integer of at least 1, got 0; the"),
        ({"train_batch_size": 1.5}, "train_batch_size: must be an integer of at least 1, got 1.5"),
        ({"train_batch_size": True}, "train_batch_size: must be an integer of at least 1, got tr"),
        ({"train_batch_size": 10**400}, "train_batch_size: must be an integer of at least 1, got"),
        ({"gradient_clipping": math.nan}, "gradient_clipping: must be a finite number of at least"),
        ({"gradient_clipping": 10**400}, "gradient_clipping: must be a finite number of at least"),
        ({"gradient_clipping": None}, "gradient_clipping: must be a finite number of at least 0, "),
        (
            {"zero_optimization": {"stage": 4}},
            "zero_optimization.stage: must be an integer from 0 to 3, got 4; the most is 3",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvm"}}},
            'zero_optimization.offload_param.device: must be "none", "cpu" or "nvme", got "nvm"; '
            'did you mean "nvme"?',
        ),
        (
            {"tiers": {"state_format": "4bit"}},
            'tiers.state_format: must be "exact", "fp32", "bf16" or "compact", got "4bit"',
        ),
        (
            {"tiers": {"update_device": "gpu"}},
            'tiers.update_device: must be "auto", "cpu" or "device", got "gpu"',
        ),
        (
            {"aio": {"engine": "iouring"}},
            'aio.engine: must be "auto", "io_uring", "kernel_aio", "threads" or "python", got',
        ),
        (
            {"tiers": {"durable": {"name": "run"}}},
            'tiers.durable: {"name": "run", "every_steps": 1',
        ),
        ({"tiers": {"durable": True}}, "tiers.durable: must be false, or an object such as "),
        ({"tiers": {"durable": {"name": "../run"}}}, "tiers.durable: must be false, or an object"),
        (
            {"tiers": {"durable": {"name": "run", "every_step": 1}}},
            "tiers.durable: must be false, or an object such as ",
        ),
        (
            {"tiers": {"durable": {"name": "run", "every_steps": 0}}},
            "tiers.durable: must be an integer of at least 1, got 0",
        ),
        ({"aio": {"use_gds": True}}, "aio.use_gds: true is not available"),
        ({"aio": {"block_size": 5000}}, "aio.block_size: must be a multiple of 4096 from 4096 to"),
        (
            {"optimizer": {"type": "AdmW"}},
            'optimizer.type: must be "Adam", "AdamW", ',
        ),
        ({"optimizer": {"params": {}}}, "optimizer.type: is missing; write "),
        (
            {"tiers": {"update_device": "gpu"}},
            'tiers.update_device: must be "auto", "cpu" or "device", got "gpu"; did you mean "dev',
        ),
        (
            {"tiers": {"state_format": "fp8"}},
            'tiers.state_format: must be "exact", "fp32", "bf16" or "compact", got "fp8"; write o',
        ),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params: must be an object of"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "optimizer.params.betas: must be a list of 2 values",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}},
            "optimizer.params.betas: must be a list of 2 values, each a finite number of at least "
            "0 and below 1, got [0.9, 1.0]; write a number of at least 0 and below 1",
        ),
        (
            {"scheduler": {"type": "WarmupDecay", "params": {}}},
            'scheduler.type: "WarmupDecay" is not a schedule; did you mean "WarmupDecayLR"?',
        ),
        (
            {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9, "eta_mn": 1}}},
            'scheduler.params.eta_mn: unknown key with the value 1; did you mean "eta_min"?',
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
            "scheduler.params.total_num_steps: is missing; write an integer of at least 1",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16.enabled: true contradicts bf16.enabled = true; keep one of the two",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}},
            'data_types.param_dtype: "fp32" contradicts bf16.enabled = true; remove one',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path: null with device nvme; write the dire",
        ),
        (
            {"tiers": {"nvme": [{"path": "/a"}, {"path": "/a"}]}},
            "tiers.nvme: names one directory twice; keep one entry for each",
        ),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled: true is not available: batch si"),
        (
            {"tensor_parallel": {"autotp_size": 4}},
            'tensor_parallel: {"autotp_size": 4} is not avai',
        ),
        ({"pipeline": {"stages": 2}}, 'pipeline: {"stages": 2} is not available: every rank runs'),
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            'zero_optimization.zenflow: {"topk_ratio": 0.1} is not available: it changes results',
        ),
        ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size: 8 is"),
        ({3: 1}, "the configuration has the key 3, a int; keys are strings"),
    ],
)
def test_refusal_names_key_value_and_fix(document: dict, error: str) -> None:
    text = refusal(document)
    assert text.startswith(error)
    assert "\n" not in text
    assert "; " in text or "did you mean" in text


def test_all_problems_are_told_at_once() -> None:
    lines = refusal({"a": 1, "bf16": {"enabled": 2}, "aio": {"queue_depth": 0}}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["aio.queue_depth", "bf16.enabled", "a"]


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (1000, 1000),
        (8e9, 8_000_000_000),
        ("8GB", 8_000_000_000),
        ("8 GiB", 8 << 30),
        ("1.5kb", 1500),
        ("0.1GB", 100_000_000),
        ("12MB", 12_000_000),
        ("2TiB", 2 << 40),
        ("17", 17),
        ("17B", 17),
        ("auto", None),
    ],
)
def test_byte_sizes(written: object, size_bytes: int | None) -> None:
    config = load_config(STAGE_3 | {"tiers": {"host_memory": written}})
    assert config.settings(1).tiers.host_memory_bytes == size_bytes


@pytest.mark.parametrize(
    "written", [0, -1, "0GB", "-1GB", "8G", "GB", "", "8 GX", "1e9", True, 1.5]
)
def test_byte_sizes_that_are_none(written: object) -> None:
    assert refusal({"tiers": {"host_memory": written}}).startswith(
        'tiers.host_memory: must be "auto" or bytes as a positive integer or a string such as "8GB"'
    )


def test_numbers_of_numpy_and_integral_floats_are_numbers() -> None:
    config = load_config(
        {
            "train_batch_size": np.int64(8),
            "gradient_clipping": np.float32(0.5),
            "zero_optimization": {"stage": 3.0, "sub_group_size": 5e8},
        }
    )
    settings = config.settings(1)
    assert settings.batch.train_batch_size == 8
    assert settings.gradient_clipping == 0.5
    assert settings.sub_group_numel == 500_000_000
    assert type(settings.sub_group_numel) is int


def test_a_configuration_cannot_be_changed() -> None:
    document = {"bf16": {"enabled": True}} | STAGE_3
    config = load_config(document)
    document["bf16"]["enabled"] = False
    assert config.settings(1).element is ElementType.BF16
    with pytest.raises(ValueError, match="frozen"):
        config.gradient_clipping = 2.0
    with pytest.raises(ValueError, match="frozen"):
        config.bf16.enabled = False


def test_the_source_is_a_file_a_mapping_or_base64(tmp_path: Path) -> None:
    document = {"train_batch_size": 8} | STAGE_3
    text = json.dumps(document)
    path = tmp_path / "c.json"
    path.write_text("\ufeff" + text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (document, path, str(path), encoded, encoded.rstrip("=")):
        assert load_config(source).settings(1).batch.train_batch_size == 8
    assert load_config(types.MappingProxyType(document)).train_batch_size == 8


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"a": 1, "a": 2}', 'key "a" occurs twice in one object, with 1 and 2; keep one'),
        ('{"bf16": {"enabled": true, "enabled": false}}', 'key "enabled" occurs twice'),
        ("[]", "must hold one JSON object, got []; write {...}"),
        ('{"a": 1,}', "line 1, column "),
        ("{", "is not JSON: "),
        ('{"a": ' + "9" * 5000 + "}", "is not usable JSON"),
        ("[" * 100_000, "is not usable JSON"),
        ('{"a": ' * 50 + "1" + "}" * 50, "is nested deeper than 32 objects"),
    ],
)
def test_text_that_is_no_configuration(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error in refusal(path)


def test_hjson_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"train_batch_size": 8, # eight\n}'
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match=r"line 1, column 25.*pip install hjson"):
        parse_text(text, "c.json")
    fake = types.ModuleType("hjson")
    fake.HjsonDecodeError = type("HjsonDecodeError", (ValueError,), {})

    def loads(text: str, object_pairs_hook: object) -> object:
        return json.loads(text.replace(", # eight", ""), object_pairs_hook=object_pairs_hook)

    fake.loads = loads
    monkeypatch.setitem(sys.modules, "hjson", fake)
    document, notices = parse_text(text, "c.json")
    assert document == {"train_batch_size": 8}
    assert notices == [
        "c.json is not strict JSON (Expecting property name enclosed in double quotes at line 1, "
        "column 25); it was read as hjson"
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist, nor is it base64" in refusal(tmp_path / "no.json")
    assert "does not exist, nor is it base64" in refusal("no-such-file.json")
    assert "Is a directory" in refusal(tmp_path)
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"a": "\xe9"}')
    assert "is not UTF-8" in refusal(latin)
    assert "cannot be read" in refusal("x" * 5000)
    assert "must be a dict, a path or base64 text, got list; pass" in refusal([])


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"aio": {"thread_count": 1, "intra_op_parallelism": 2}}, "aio.thread_count is the old"),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16 is the old spelling of bf16, and both"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.cpu_offload is the old spelling of zero_optimization.offload_opt",
        ),
        ({"zero_optimization": {"cpu_offload": "yes"}}, "zero_optimization.cpu_offload: must be"),
        (
            {
                "zero_optimization": {
                    "cpu_offload_use_pin_memory": False,
                    "offload_param": {"pin_memory": True},
                }
            },
            "zero_optimization.cpu_offload_use_pin_memory = false contradicts",
        ),
    ],
)
def test_old_and_new_spelling_together(document: dict, error: str) -> None:
    text = refusal(document)
    assert text.startswith(error)
    assert "; " in text


def test_thread_count_reaches_the_engine() -> None:
    with pytest.warns(ConfigWarning, match=r"aio.thread_count is an old spelling; write aio.intra"):
        config = load_config(STAGE_3 | {"aio": {"thread_count": 6}})
    assert config.settings(1).aio.thread_count == 6


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_hints_change_nothing_beside_tiers(device: str) -> None:
    """buffer_count, buffer_size and ratio against the budgets of tiers."""
    tiers = {"host_memory": "1GB", "nvme": [{"path": "/n"}]}
    plain = {"device": device}
    hints = plain | {"buffer_count": 3}

    def settings(param: dict, optimizer: dict):
        zero = {"stage": 3, "offload_param": param, "offload_optimizer": optimizer}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = load_config({"zero_optimization": zero, "tiers": tiers}).settings(1)
        return result, [str(entry.message) for entry in caught]

    bare, silent = settings(plain, plain)
    assert silent == []
    hinted, told = settings(hints | {"buffer_size": 9}, hints | {"ratio": 0.5, "fast_init": True})
    assert hinted.tiers == bare.tiers
    tier = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}[device]
    for got in (bare, hinted):
        assert (got.parameter_offload.tier, got.optimizer_offload.tier) == (tier, tier)
    (text,) = told
    for key in ("buffer_size", "buffer_count"):
        assert f"zero_optimization.offload_param.{key}" in text
    for key in ("ratio", "buffer_count", "fast_init"):
        assert f"zero_optimization.offload_optimizer.{key}" in text
    assert "tiers.host_memory" in text


@pytest.mark.parametrize(("written", "cap"), [({}, None), ({"max_in_cpu": 5e8}, 500_000_000)])
def test_max_in_cpu_caps_what_the_budget_would_keep(written: dict, cap: int | None) -> None:
    offload = {"device": "nvme", "nvme_path": "/a"} | written
    settings = load_config({"zero_optimization": {"stage": 3, "offload_param": offload}}).settings(
        1
    )
    assert settings.parameter_offload.max_host_numel == cap


def test_nvme_path_fills_tiers_and_tiers_wins() -> None:
    offload = {"device": "nvme", "nvme_path": "/a"}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    filled = load_config({"zero_optimization": zero}).settings(1).tiers.nvme
    assert [entry.path for entry in filled] == [Path("/a")]
    with pytest.warns(ConfigWarning, match=r"nvme_path = \"/a\" has no effect: tiers.nvme names"):
        config = load_config({"zero_optimization": zero, "tiers": {"nvme": [{"path": "/b"}]}})
    assert [entry.path for entry in config.settings(1).tiers.nvme] == [Path("/b")]
    unused = {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/a"}}
    assert load_config({"zero_optimization": unused}).settings(1).tiers.nvme == ()


def test_batch_errors_name_sources_and_two_ways_out() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(32, 4, 2, 3)
    assert str(caught.value) == (
        "train_batch_size must equal train_micro_batch_size_per_gpu x gradient_accumulation_steps "
        "x world size, but train_batch_size = 32 (written), train_micro_batch_size_per_gpu = 4 "
        "(written), gradient_accumulation_steps = 2 (written) and world size = 3 (the number of "
        "ranks); set train_batch_size to 24, or remove train_batch_size, which is then derived"
    )
    with pytest.raises(
        ConfigError, match=r"set train_batch_size to 16, or set gradient_acc.* to 4"
    ):
        resolve_batch(32, 4, 2, 2)
    with pytest.raises(ConfigError, match=r"to 6, or remove train_batch_size and write train_mic"):
        resolve_batch(7, None, None, 2)
    with pytest.raises(ConfigError, match=r"is 7, but train_micro.* = 8 .* need at least 8; set"):
        resolve_batch(7, 8, None, 1)
    with pytest.raises(
        ConfigError, match=r"is 1, but .* need at least 8; set train_batch_size to 8"
    ):
        resolve_batch(1, None, 4, 2)
    with pytest.raises(ConfigError, match="path of the configuration file is empty"):
        load_config("")
    with pytest.raises(ConfigError, match="both missing"):
        resolve_batch(None, None, 4, 1)
    with pytest.raises(ConfigError, match="world_size must be at least 1, got 0"):
        resolve_batch(1, None, None, 0)


def test_without_batch_keys_micro_batches_of_one() -> None:
    assert tuple(load_config({}).batch(3)) == (3, 1, 1)
    everything = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "auto",
    )
    assert tuple(load_config(everything).batch(2)) == (2, 1, 1)
    assert tuple(load_config(everything | {"gradient_accumulation_steps": 4}).batch(2)) == (8, 1, 4)
    with pytest.raises(ConfigError, match="both missing"):
        load_config({"gradient_accumulation_steps": 4}).batch(2)


def test_hidden_size_of_a_model() -> None:
    namespace = types.SimpleNamespace
    assert hidden_size_of(namespace(config=namespace(hidden_size=64))) == 64
    assert hidden_size_of(namespace(config=namespace(hidden_sizes=[8, 32]))) == 32
    nested = namespace(config=namespace(text_config=namespace(hidden_size=16)))
    assert hidden_size_of(nested) == 16
    assert hidden_size_of(object()) is None


def test_importing_says_nothing_and_needs_no_hjson() -> None:
    code = "import sys, zero.config; assert 'hjson' not in sys.modules"
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True)
    assert done.stdout == b""
