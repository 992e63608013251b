"""Checkpoints that DeepSpeed wrote go on training here, with the losses that it had.

`tests/goldens/deepspeed` has what `tests/peer/make_deepspeed_checkpoint.py` wrote with DeepSpeed
0.19.6, all with the optimizer in host memory: stages 1 to 3, one and two ranks, and two of them
made universal. With TIERZERO_DEEPSPEED_PYTHON, a Python that has DeepSpeed, they are made anew.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.peer.make_config import peer_training
from tests.peer.model import make_peer_model, parameter_groups, peer_batch
from tests.support.fork_ranks import on_ranks
from zero.checkpoint.deepspeed_files import PeerCheckpoint

ROOT = Path(__file__).resolve().parents[3]
GOLDENS = ROOT / "tests" / "goldens" / "deepspeed"
CASES = sorted(path.name.partition(".")[0] for path in GOLDENS.glob("*.tar.xz"))
TIERS = {"device": None, "cpu": "cpu", "nvme": "nvme"}
SAVED_STEPS = 3


def unpacked(case: str, place: Path) -> Path:
    with tarfile.open(GOLDENS / f"{case}.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(place)
    return place / case


def make_engine(
    place: Path, tier: str, accumulation: int, seed: int = 9, **options: int
) -> zero.ZeroEngine:
    """Return an engine of other weights, with the peer's hyper-parameters."""
    model = make_peer_model(seed)
    config = peer_training(str(place), tier, accumulation)
    config["zero_optimization"] |= options
    engine, _, _, _ = zero.initialize(
        model=model, model_parameters=parameter_groups(model), config=config
    )
    return engine


def go_on(engine: zero.ZeroEngine, steps: int, ranks: int) -> list[float]:
    """Train on the batches of all of the peer's ranks, and return the mean loss of each step."""
    losses = []
    for step in range(engine.global_steps, steps):
        total = 0.0
        for index in range(engine.gradient_accumulation_steps()):
            rank = index if engine.world_size == 1 else engine.global_rank
            loss = engine(*peer_batch(step, rank))
            engine.backward(loss)
            total += loss.item()
        engine.step()
        mine = torch.tensor([total], dtype=torch.float64)
        losses.append(float(engine._runtime.communicator.gather_rows(mine).sum()) / ranks)
    return losses


def check_losses(found: list[float], folder: Path) -> None:
    wanted = json.loads((folder / "losses.json").read_text())[SAVED_STEPS:]
    assert len(found) == len(wanted) == 5
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5), (found, wanted)


@pytest.mark.parametrize(
    ("case", "tier"), [(case, list(TIERS)[index % 3]) for index, case in enumerate(CASES)]
)
def test_training_goes_on_with_the_losses_of_the_peer(tmp_path: Path, case: str, tier: str) -> None:
    folder = unpacked(case, tmp_path)
    ranks = int(case[-1])
    engine = make_engine(tmp_path, tier, ranks)
    assert bool(engine.plan.memory.swap_file_bytes) == (tier == "nvme")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing differs, so nothing is warned of
        path, client = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step3")
    assert client["note"] == "from the peer"
    assert engine.global_steps == SAVED_STEPS
    assert engine.lr_scheduler.last_batch_iteration == SAVED_STEPS - 1
    rates = engine.get_lr()
    assert rates == pytest.approx([0.0036672579134208465] * 2, rel=1e-12)
    check_losses(go_on(engine, 8, ranks), folder)
    assert engine._history.updates == 8
    if tier == "nvme":
        assert engine.ledger.snapshot().bytes_by_class["nvme read state"] > 0
    engine.destroy()


def other_values(engine: zero.ZeroEngine, peer: PeerCheckpoint) -> tuple[list[str], int]:
    """Look at this rank's copies alone: which are not the peer's values, and how many there are."""
    wrong, plain = [], 0
    for name, parameter in engine.module.named_parameters():
        if type(parameter) is torch.nn.Parameter:
            is_frozen = name in peer.frozen_shapes
            saved = peer.read_frozen(name).float() if is_frozen else peer.read(name, "fp32")
            plain += 1
            wrong += (
                [] if torch.equal(parameter.detach().reshape(-1), saved.reshape(-1)) else [name]
            )
    return wrong, plain


WAYS: dict[str, list[tuple[str, dict[str, int], int]]] = {
    "stage3_world2": [
        ("device", {"stage": 0}, 12),
        ("device", {"stage": 2}, 12),
        ("device", {"stage3_param_persistence_threshold": 60}, 8),
        ("cpu", {}, 0),
    ],
    "stage2_world1": [("device", {"stage": 1}, 12), ("cpu", {}, 0)],
}
"""Tier, keys, and how many parameters each rank has in full."""


@pytest.mark.parametrize("case", WAYS)
def test_two_ranks_load_what_any_number_saved(tmp_path: Path, case: str) -> None:
    """Also where each rank has all values, or those of small parameters: it gets the others'."""
    folder = unpacked(case, tmp_path)
    ranks = int(case[-1])
    peer = PeerCheckpoint(folder / "global_step3")

    def work(_rank: int) -> list[Any]:
        found: list[Any] = []
        for tier, options, _ in WAYS[case]:
            engine = make_engine(tmp_path, tier, 1, **options)
            engine.load_checkpoint(folder)
            sums = [
                value.double().sum().item()
                for state in zero.iterate_states(engine.module)
                for value in (state.value, state.exp_avg)
                if value is not None
            ]
            held = other_values(engine, peer)
            found.append((held, sums, go_on(engine, 8, ranks) if ranks == 2 else []))
            engine.destroy()
        return found

    first, second = on_ranks(work, 2, tmp_path)
    assert first == second
    assert [held for held, *_ in first] == [[[], plain] for *_, plain in WAYS[case]]
    wanted = {name: peer.read(name, "fp32").double().sum().item() for name in peer.shapes}
    for _, sums, losses in first:
        assert all(any(each == pytest.approx(one) for one in sums) for each in wanted.values())
        if ranks == 2:
            check_losses(losses, folder)


def test_what_differs_is_told(tmp_path: Path) -> None:
    folder = unpacked("stage3_world1", tmp_path)
    model = make_peer_model(1)
    config = peer_training(str(tmp_path), "device", 1)
    del config["scheduler"]
    engine, _, _, _ = zero.initialize(model=model, config=config)  # one group instead of two
    with pytest.warns(zero.ResumeWarning) as caught:
        engine.load_checkpoint(folder)
    text = str(caught[0].message)
    assert "parameter groups: saved 2, now 1" in text
    assert "schedule: one was saved and none is here" in text
    assert engine.resume_report
    engine.destroy()


def test_weights_alone_leave_the_optimizer_as_it_is(tmp_path: Path) -> None:
    folder = unpacked("stage3_world2", tmp_path)
    engine = make_engine(tmp_path, "device", 1)
    engine.load_checkpoint(folder, load_module_only=True)
    peer = PeerCheckpoint(folder / "global_step3")
    for state in zero.iterate_states(engine.module):
        saved = (
            peer.read_frozen(state.name)
            if state.name in peer.frozen_shapes
            else peer.read(state.name, "fp32")
        )
        assert torch.equal(state.value.reshape(-1), saved)
        assert state.exp_avg is None or not state.exp_avg.any()
    assert engine._history.updates == 0
    engine.destroy()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def plant_bomb(folder: Path) -> None:
    target = folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Bomb()}, target)


def plant_old_bomb(folder: Path) -> None:
    target = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    target.write_bytes(pickle.dumps(Bomb()))


def lose_rank(folder: Path) -> None:
    (folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def cut(folder: Path) -> None:
    target = folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    target.write_bytes(target.read_bytes()[:3000])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (plant_bomb, r"optim_states.pt names (posix|os)\.mkdir: nothing of it was used"),
        (plant_old_bomb, r"model_states.pt"),
        (lose_rank, r"has 1 files of the optimizer and was saved by 2 ranks"),
        (cut, r"optim_states.pt"),
    ],
)
def test_damaged_and_malicious_files_are_refused_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = unpacked("stage3_world2", tmp_path)
    harm(folder)
    engine = make_engine(tmp_path, "device", 1)
    before = [state.value.clone() for state in zero.iterate_states(engine.module)]
    with pytest.raises(zero.CheckpointError, match=said):
        engine.load_checkpoint(folder)
    after = [state.value for state in zero.iterate_states(engine.module)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not (tmp_path / "exploded").exists()
    go_on(engine, 1, 1)
    engine.destroy()


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = unpacked("stage2_world1", tmp_path)
    model = make_peer_model()
    model.odd = torch.nn.Linear(12, 4)
    config = peer_training(str(tmp_path), "device", 1)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    with pytest.raises(zero.CheckpointError, match=r"odd.weight has shape \(4, 12\), there \(5, "):
        engine.load_checkpoint(folder)
    engine.destroy()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_made_now_goes_on_with_the_losses_of_the_peer(
    tmp_path: Path, stage: int, ranks: int
) -> None:
    python = os.environ.get("TIERZERO_DEEPSPEED_PYTHON")
    if python is None:
        pytest.skip("TIERZERO_DEEPSPEED_PYTHON names no Python that has DeepSpeed 0.19")
    made = subprocess.run(
        [
            *(python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *("make_deepspeed_checkpoint.py", str(tmp_path / "made"), str(stage), "cpu"),
        ],
        cwd=ROOT / "tests" / "peer",
        env={
            **os.environ,
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "tests" / "peer"),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    engine = make_engine(tmp_path, "cpu", ranks)
    engine.load_checkpoint(tmp_path / "made")
    check_losses(go_on(engine, 8, ranks), tmp_path / "made")
    engine.destroy()


def test_an_optimizer_without_a_kernel_takes_the_weights_alone(tmp_path: Path) -> None:
    folder = unpacked("stage2_world1", tmp_path)
    model = make_peer_model(9)
    config = peer_training(str(tmp_path), "cpu", 1)
    config.pop("optimizer", None)
    given = torch.optim.RMSprop(parameter_groups(model))
    engine = zero.initialize(model=model, optimizer=given, config=config)[0]
    with pytest.raises(zero.CheckpointError, match=r"RMSprop, which has no kernel.*weights alone"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    other = make_engine(tmp_path, "cpu", 1)
    other.load_checkpoint(folder)
    wanted = {state.name: state.value for state in zero.iterate_states(other.module)}
    for state in zero.iterate_states(engine.module):
        assert torch.equal(state.value, wanted[state.name]), state.name
    engine.destroy()
    other.destroy()
