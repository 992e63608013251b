"""`python -m zero plan` and `fit` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero
from aio_ops.tune.command import main as tune
from estimators.estimate import estimate
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.config.__main__ import main as check_config
from zero.plan_command import _parser, main
from zero.plan_inputs import ask, plan_inputs

MACHINE = ["--gpu", "24GB", "--host", "64GB", "--nvme", "1TB"]
OFFLOADED = ["--offload-param", "nvme", "--offload-optimizer", "nvme", "--checkpointing"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_as_json_is_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3.2-1b", *MACHINE, *OFFLOADED, "--seq", "512", "--tbw", "600TB"]
    code, found = run_json(capsys, *arguments)
    options = _parser().parse_args(arguments)
    made = estimate(plan_inputs(options, ask(options)))
    assert code == 0
    assert found == json.loads(json.dumps(made.to_dict()))
    assert found["model"]["parameters"] == 1_235_814_400
    assert found["fits"]


def test_a_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*MACHINE, *OFFLOADED, "--host", "8GB", "--tbw", "600TB"]
    assert main(["plan", "llama-3.2-3b", *arguments]) == 0
    printed = capsys.readouterr().out
    for text in (
        "llama-3.2-3b: 3.21 B parameters in 29 units",
        "activations kept for the backward",
        "CUDA context",
        "It fits.",
        "drive binds",
        "drive writes a day",
        "The rated 600 TB are written after",
        "2.00 GB/s written (assumed)",
        "tierzero-nvme-tune DIR --json",
    ):
        assert text in printed, text


def test_a_plan_says_where_memory_holds_what_might_have_paged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for host, is_spared in (("512GB", True), ("8GB", False)):
        code = main(["plan", "llama-3.2-3b", *MACHINE, *OFFLOADED, "--host", host])
        assert code == 0
        assert ("Nothing rests on NVMe" in capsys.readouterr().out) is is_spared
    main(["plan", "llama-3.2-3b", *MACHINE, "--host", "512GB"])
    assert "Nothing rests on NVMe" not in capsys.readouterr().out


def test_what_does_not_fit_is_exit_1_and_what_is_wrong_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "llama-3-8b", "--gpu", "24GB", "--host", "64GB"]) == 1
    assert "It does not fit: each GPU needs" in capsys.readouterr().out
    bad = tmp_path / "bad.json"
    bad.write_text('{"zero_optimisation": {}}', encoding="utf-8")
    (tmp_path / "not.json").write_text("rates", encoding="utf-8")
    for arguments, message in (
        (["lama-3-8b"], "did you mean llama-3-8b"),
        (["gpt2", "--gpu", "rtx4909"], "did you mean rtx4090"),
        (["gpt2", "--host", "lots"], "'lots' is not a size"),
        (["gpt2", "--config", str(bad)], "zero_optimization"),
        (["gpt2", "--measured", str(tmp_path / "none.json")], "No such file"),
        (["gpt2", *OFFLOADED, "--host", "550MB"], "host memory"),
        (["gpt2", "--plot", "chart.jpg"], "a chart is a .png or an .html file"),
        (["gpt2", "--batch", "0"], "a batch needs at least one sample"),
        (["gpt2", "--gpu", "0"], "--gpu 0 has no memory"),
        (["gpt2", "--host", "1e400GB"], "more than anything has"),
        (["gpt2", "--tbw", "0"], "--tbw 0 is no size"),
        (["gpt2", "--measured", str(tmp_path / "not.json")], "is not JSON"),
        (["json:loads"], "json:loads() failed on meta: TypeError"),
    ):
        assert main(["plan", *arguments]) == 2, arguments
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for file, reason in (
        (tmp_path / "none" / "it.json", f"there is no folder {tmp_path / 'none'}: make it"),
        (tmp_path, "is a folder: name a file in it"),
        (Path("/proc/1/it.html"), "cannot be written"),
    ):
        for arguments in (
            ["fit", "gpt2", "--write"],
            ["fit", "gpt2", "--plot"],
            ["plan", "gpt2", "--plot"],
        ):
            with pytest.raises(SystemExit):
                main([*arguments, str(file)])
            said = capsys.readouterr()
            assert reason in said.err
            assert said.out == ""


@pytest.mark.nvme
def test_the_configuration_of_a_fit_trains(
    capsys: pytest.CaptureFixture[str], scratch: Path
) -> None:
    file = scratch / "ds.json"
    where = ["--gpu", "cpu", "--host", "8GB", "--nvme", "10GB", "--nvme-path", str(scratch)]
    name = "tests.support.tiny:make_model"
    assert main(["fit", name, *where, "--dtype", "fp32", "--write", str(file)]) == 0
    assert f"Its configuration is in {file}" in " ".join(capsys.readouterr().out.split())
    engine = zero.initialize(model=make_model(), config=file)[0]
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_samples_of_a_step_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt2", *MACHINE, "--train-batch-size", "0"]) == 2
    assert "at least one sample, got 0" in capsys.readouterr().err
    assert main(["fit", "gpt2", *MACHINE, "--train-batch-size", "7", "--gpus", "2"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "7 samples of a step do not divide into micro-batches of any power" in printed


def test_of_a_built_model_no_pace_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.support.tiny:make_model"
    assert main(["fit", name, *MACHINE]) == 0
    printed = capsys.readouterr().out
    assert "what its forward keeps is unknown" in printed
    assert "no pace is told" in printed
    assert "tokens/s." not in printed
    _, found = run_json(capsys, "fit", name, *MACHINE)
    for choice in found["choices"]:
        assert choice["step"]["expected_s"] is None
        assert choice["step"]["tokens"] == 4096  # one sample, not as many as nothing would take
    code, plan = run_json(capsys, "plan", name, *MACHINE, "--offload-optimizer", "nvme")
    assert (code, plan["step"]["flops_per_micro_batch"]) == (0, None)


def test_a_plan_of_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path="/tmp", dtype="bf16", host_memory="1GB"
    )
    file.write_text(json.dumps(config), encoding="utf-8")
    code, found = run_json(capsys, "plan", "gpt2", "--config", str(file), "--seq", "128")
    assert code == 0
    assert 0.9e9 < found["rank"]["host_arena_bytes"] <= 1e9
    assert found["rank"]["nvme_bytes"] > 0


def test_a_fit_writes_a_configuration_that_gives_the_same_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "fit.json"
    arguments = ["llama-3.2-1b", "--gpu", "10GB", "--nvme", "1TB", "--seq", "1024"]
    code, found = run_json(capsys, "fit", *arguments, "--host", "12GB", "--write", str(file))
    assert code == 0
    assert check_config(["check", str(file)]) == 0
    capsys.readouterr()
    best = found["choices"][0]
    again = ["--checkpointing"] if "Checkpointing" in " ".join(found["notes"]) else []
    code, planned = run_json(capsys, "plan", *arguments, "--config", str(file), *again)
    assert code == 0
    assert planned == best
    assert planned["rank"]["nvme_bytes"] > 0
    assert json.loads(file.read_text()) == found["configuration"]


def test_a_fit_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt2", "--gpu", "4GB", "--host", "1.5GB", "--nvme", "2GB",
                 "--seq", "512"]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    for text in (
        "What fits, fastest first",
        "What one more resource buys",
        "twice the host memory",
        '"zero_optimization": {',
    ):
        assert text in printed, text
    assert main(["fit", "gpt2", "--gpu", "1GB", "--host", "2GB"]) == 1
    printed = capsys.readouterr().out
    assert "Nothing fits:" in printed
    assert "No drive was tried: --nvme SIZE" in printed
    assert "What fits" not in printed
    assert main(["fit", "gpt2", "--gpu", "1GB", "--host", "64", "--nvme", "1TB"]) == 1
    assert "a number without a unit is bytes" in " ".join(capsys.readouterr().out.split())


def test_a_plan_without_limits_says_what_it_takes_for_granted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "gpt2", *OFFLOADED, "--host", "600MB"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "It fits if each GPU has" in printed
    assert "(--nvme was not given)" in printed
    assert main(["plan", "gpt2", *OFFLOADED, *MACHINE]) == 0
    assert "It fits." in capsys.readouterr().out


def test_a_function_named_like_an_emoji_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\ndef M(): return torch.nn.Linear(8, 8)\n"
    (tmp_path / "emoji_named.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "emoji_named:M", *MACHINE]) == 0
    assert "emoji_named:M: 72 parameters" in capsys.readouterr().out


@pytest.mark.full
def test_the_largest_models_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt2", "--gpu", "4GB", "--host", "1.5GB", "--nvme", "2GB",
                 "--seq", "512", "--largest"]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert "The largest of these widths: gpt2" in printed
    assert "The largest by name:" in printed


def test_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="charts as PNG need matplotlib")
    arguments = ["plan", "llama-3.2-3b", *MACHINE, *OFFLOADED, "--host", "8GB"]
    assert main([*arguments, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--plot", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "activations kept for the backward: " in page
    assert "tiers.host_memory: " in page
    capsys.readouterr()


def test_the_module_is_a_command() -> None:
    command = [sys.executable, "-m", "zero", "plan", "gpt2", "--seq", "128", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["parameters"] == 124_439_808


def test_a_model_of_a_function_is_planned_without_activations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "tests.support.tiny:make_model", "--host", "8GB"]) == 0
    printed = capsys.readouterr().out
    assert "only sizes are known" in printed
    assert "activations kept" not in printed


@pytest.mark.full
@pytest.mark.nvme
def test_rates_that_the_tuner_writes(
    scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tune.json"
    assert tune([str(scratch), "--json", str(file), "--seconds", "2", "--io_size", "64M"]) == 0
    capsys.readouterr()
    (directory,) = json.loads(file.read_text(encoding="utf-8"))["directories"]
    code, found = run_json(
        capsys, "plan", "gpt2", *OFFLOADED, "--host", "700MB", "--measured", str(file)
    )
    assert code == 0
    read = found["node"]["nvme_read_bytes_per_step"]
    written = found["node"]["nvme_written_bytes_per_step"]
    assert read > 0
    rates = {name: each["rate"]["high"] for name, each in directory["workloads"].items()}
    turns = read / rates["read"] + written / rates["write"]
    assert 0 < found["step"]["parts_s"]["drive"] <= turns * (1 + 1e-9)
