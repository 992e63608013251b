"""What cannot be gone on with is refused by name, with the way out; what is torn falls back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from aio_ops import Fault, Platter, SimulatedDisk, StripedFile
from aio_ops.directories import SyncedDirectory
from estimators import PlanError
from offload import Manifests
from tests.aio_ops.disks import mounted
from tests.support.durable import (
    Noisy,
    batch,
    begin,
    durable_config,
    expected,
    make_noisy,
    run_step,
    state_of,
)

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    place = str(tmp_path_factory.mktemp("oracle"))
    return {
        mix: expected(durable_config(place, None, mix), STEPS) for mix in ("nvme", "host", "device")
    }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # no engine left its handler


def trained(place: Path, mix: str, steps: int = 2, **more: Any) -> Path:
    """Train a run named "run", end it, and return its only rank's directory."""
    engine = begin(durable_config(str(place), "run", mix, **more))
    for _ in range(steps):
        run_step(engine)
    engine.destroy()
    return place / "run" / "rank-0"


def finish(place: Path, mix: str, wanted: list[str], at: int) -> zero.ZeroEngine:
    """Resume at a step, train to the end, and return the destroyed engine."""
    engine = begin(durable_config(str(place), "run", mix), seed=5)
    assert engine.durable is not None
    assert engine.durable.resumed is not None
    assert engine.durable.resumed.step == engine.global_steps == at
    assert state_of(engine) == wanted[at]
    while engine.global_steps < STEPS:
        run_step(engine)
    assert state_of(engine) == wanted[STEPS]
    engine.destroy()
    return engine


def flip_bytes(path: Path, offset: int, count: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(count)
        file.seek(offset)
        file.write(bytes(each ^ 0x55 for each in old))


def newest(directory: Path) -> tuple[Path, Any]:
    """Return the newest manifest file and its commit."""
    found = Manifests(SyncedDirectory(directory)).commits[0]
    name = "commit-0" if found.name.sequence % 2 else "commit-1"
    return directory / name, found


def test_the_directory_is_private_and_says_what_is_in_it(
    place: Path, wanted: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    directory = trained(place, "nvme")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["commit-0", "commit-1", "lock", "swap-1"]
    for path in (directory, directory.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    engine = finish(place, "nvme", wanted["nvme"], at=2)
    assert "durable run 'run': resumed at step 2 (commit 2; " in caplog.text
    assert engine.durable is not None
    report = engine.durable.last_commit
    assert report is not None
    assert (report.step, report.sequence) == (STEPS, STEPS)
    assert 0 < report.resident_bytes <= engine.plan.memory.commit_bytes
    assert report.manifest_bytes > 5000  # the random generators alone
    size = engine.plan.memory.swap_file_bytes
    assert (directory / "swap-1").stat().st_size == size


def test_the_extra_bytes_are_those_of_the_plan(place: Path) -> None:
    plain = zero.plan_memory(make_noisy(), durable_config(str(place), None, "nvme")).memory
    durable = zero.plan_memory(make_noisy(), durable_config(str(place), "run", "nvme")).memory
    assert plain.host_bytes == durable.host_bytes
    extra = durable.swap_file_bytes - plain.swap_file_bytes
    assert extra == durable.twin_bytes + 2 * durable.commit_bytes > 0
    rows = {row.what: row.size_bytes for row in durable.rows()}
    assert rows["second copies (durable)"] == durable.twin_bytes
    config = durable_config(str(place), "run", "nvme")
    config["tiers"]["nvme"][0]["capacity"] = durable.swap_file_bytes - 1
    with pytest.raises(PlanError, match=r"do without tiers.durable, whose second copies take \d+"):
        begin(config)
    assert not any((place / "run" / "rank-0").glob("swap-*"))


@pytest.mark.parametrize("mix", ["nvme", "host"])
def test_a_corrupted_manifest_falls_back_to_the_commit_before(
    place: Path, wanted: dict[str, list[str]], mix: str
) -> None:
    directory = trained(place, mix)
    path, _ = newest(directory)
    flip_bytes(path, 200)
    finish(place, mix, wanted[mix], at=1)


@pytest.mark.parametrize("mix", ["nvme", "host", "device"])
def test_a_corrupted_extent_falls_back_to_the_commit_before(
    place: Path, wanted: dict[str, list[str]], mix: str
) -> None:
    directory = trained(place, mix)
    commit = newest(directory)[1]
    memory = zero.plan_memory(make_noisy(), durable_config(str(place), "run", mix)).memory
    places = {}
    for copy in memory.resident_copies:
        places[copy.offsets[0]] = copy.offsets
    for group in memory.sub_groups:
        for section, _, _ in group.extent.sections if group.extent is not None else ():
            if section.name != "GRADIENT" and group.extent is not None:
                both = tuple(group.extent.copy_offset(section, copy) for copy in (0, 1))
                places[both[0]] = both
    older = Manifests(SyncedDirectory(directory)).commits[1]
    before = {entry.place: entry for entry in older.entries}
    moved = [entry for entry in commit.entries if before[entry.place].copy != entry.copy]
    assert moved
    flip_bytes(directory / "swap-1", places[moved[-1].place][moved[-1].copy] + 100)
    engine = finish(place, mix, wanted[mix], at=1)
    assert engine.durable is not None
    assert engine.durable.resumed is not None
    assert "commit 2 was not taken: rank 0: " in engine.durable.resumed.fell_back[0]
    assert "has another checksum" in engine.durable.resumed.fell_back[0]


def cut_swap_file(directory: Path) -> None:
    os.truncate(directory / "swap-1", 4096)


def break_all(directory: Path) -> None:
    for path in directory.glob("commit-*"):
        flip_bytes(path, 300)


def lose_swap_file(directory: Path) -> None:
    (directory / "swap-1").unlink()


def break_data(directory: Path) -> None:
    size = (directory / "swap-1").stat().st_size
    flip_bytes(directory / "swap-1", 0, size)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut_swap_file, r"swap-1 has 4096 bytes, and \d+ are needed"),
        (break_all, "rank 0: commit-0: it is torn or was changed; rank 0: commit-1: it is torn"),
        (lose_swap_file, "No such file or directory: .*swap-1"),
        (break_data, "commit 2 was not taken: .*; commit 1 was not taken: "),
    ],
)
def test_what_cannot_be_resumed_is_refused_not_begun_anew(
    place: Path, harm: Callable[[Path], None], said: str
) -> None:
    directory = trained(place, "nvme")
    harm(directory)
    before = sorted((path.name, path.stat().st_size) for path in directory.iterdir())
    with pytest.raises(zero.DurableError, match=said):
        begin(durable_config(str(place), "run", "nvme"))
    assert before == sorted((path.name, path.stat().st_size) for path in directory.iterdir())


def test_a_run_that_lives_keeps_its_name(place: Path, wanted: dict[str, list[str]]) -> None:
    config = durable_config(str(place), "run", "device")
    first = begin(config)
    with pytest.raises(zero.DurableError, match="in use by another engine of this process"):
        begin(config)
    code = (
        "import sys, fcntl, os\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "try:\n    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError:\n    print('locked')\n"
    )
    lock = place / "run" / "rank-0" / "lock"
    other = subprocess.run(
        [sys.executable, "-c", code, lock], capture_output=True, text=True, check=True
    )
    assert other.stdout == "locked\n"  # also after the refusal, which opened nothing
    run_step(first)
    first.destroy()
    other = subprocess.run(
        [sys.executable, "-c", code, lock], capture_output=True, text=True, check=True
    )
    assert other.stdout == ""
    finish(place, "device", wanted["device"], at=1)


def test_a_run_of_another_process_keeps_its_name(place: Path) -> None:
    directory = trained(place, "device", steps=1)
    code = (
        "import sys, fcntl, os\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, directory / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(zero.DurableError, match="in use by a living run"):
            begin(durable_config(str(place), "run", "device"))
        other.kill()
    engine = begin(durable_config(str(place), "run", "device"))
    assert engine.global_steps == 1
    engine.destroy()


class Wider(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.more.weight.sum()


def test_another_model_or_plan_is_refused(place: Path) -> None:
    trained(place, "nvme")
    config = durable_config(str(place), "run", "nvme")
    with pytest.raises(zero.DurableError, match="trains another model: names or shapes of param"):
        zero.initialize(model=Wider(), config=config)
    thawed = make_noisy()
    thawed.frozen.requires_grad_(requires_grad=True)
    with pytest.raises(
        zero.DurableError, match=r"frozen parameters, .* by another version; set it as it was"
    ):
        zero.initialize(model=thawed, config=config)
    config["tiers"]["host_memory"] = "100KB"
    with pytest.raises(
        zero.DurableError, match=r"planned with 44000 .* and 100000 are given now, or"
    ):
        begin(config)
    config["tiers"]["host_memory"] = "auto"  # means as the run began, if there is one
    engine = begin(config)
    assert engine.plan.memory.host_budget_bytes == 44000
    assert engine.plan.host_budget_source == "as the durable run began (auto)"
    engine.destroy()


def test_a_foreign_directory_is_refused(place: Path) -> None:
    (place / "run").write_text("a file")
    with pytest.raises(zero.DurableError, match="is not a directory of user"):
        begin(durable_config(str(place), "run", "device"))


def test_a_read_only_file_system_is_named(place: Path) -> None:
    with mounted(place / "locked", "tmpfs", "ro") as directory:
        config = durable_config(str(directory), "run", "device")
        config["tiers"]["nvme"][0]["allow_any_file_system"] = True
        with pytest.raises(
            (zero.DurableError, OSError), match=r"locked cannot be written: Read-only"
        ):
            begin(config)


@pytest.mark.filterwarnings("ignore:.*which is memory")
def test_a_full_disk_is_found_before_anything_is_trained(place: Path) -> None:
    with mounted(place / "small", "tmpfs", "size=128k") as directory:
        (directory / "filler").write_bytes(bytes(80 << 10))
        with pytest.raises((zero.DurableError, OSError), match=r"(needs|reserve) \d+ bytes"):
            begin(durable_config(str(directory), "run", "device"))
        assert not any((directory / "run" / "rank-0").glob("swap-*"))


def test_a_manifest_that_cannot_be_written_changes_nothing(
    place: Path, wanted: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begin(durable_config(str(place), "run", "nvme"))
    run_step(engine)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SyncedDirectory, "sync", refuse)
        with pytest.raises(zero.DurableError, match=r"rank 0: OSError.*A crash now falls back to"):
            run_step(engine)
    assert engine.global_steps == 2  # the step is done; only its commit is not
    assert state_of(engine) == wanted["nvme"][2]
    run_step(engine)
    assert engine.durable is not None
    assert engine.durable.last_commit is not None
    assert (engine.durable.last_commit.step, engine.durable.last_commit.sequence) == (3, 2)
    engine.destroy()
    finish(place, "nvme", wanted["nvme"], at=3)


def test_resident_state_that_cannot_be_written_is_written_with_the_next_commit(
    place: Path, wanted: dict[str, list[str]]
) -> None:
    config = durable_config(str(place), "run", "host")
    platter = Platter()
    engine = begin(config, io_engine=SimulatedDisk(1, platter=platter))
    run_step(engine)
    disk = engine._runtime.store.engine
    assert isinstance(disk, SimulatedDisk)
    disk._fault = Fault(disk.submitted + 1, "eio")
    with pytest.raises(zero.DurableError, match=r"rank 0: TransferError: .*simulated"):
        run_step(engine)
    disk._fault = None
    run_step(engine)
    engine.destroy()
    again = begin(config, seed=4, io_engine=SimulatedDisk(2, platter=platter))
    assert state_of(again) == wanted["host"][3]
    again.destroy()


def test_a_file_that_cannot_be_synced_ends_the_run(place: Path, wanted: dict[str, list]) -> None:
    engine = begin(durable_config(str(place), "run", "nvme"))
    run_step(engine)
    file = engine._runtime.store.swap_file
    assert file is not None

    def refuse() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file.sync = refuse  # type: ignore[method-assign]
    with pytest.raises(zero.DurableError, match="could not commit: rank 0: OSError"):
        run_step(engine)
    with pytest.raises(RuntimeError, match="could not be synced"):
        run_step(engine)
    engine.destroy()
    finish(place, "nvme", wanted["nvme"], at=1)


def test_commits_come_every_so_many_steps_and_when_asked(place: Path) -> None:
    engine = begin(durable_config(str(place), "run", "host", every_steps=3))
    assert engine.durable is not None
    steps = []
    for _ in range(4):
        run_step(engine)
        steps.append(engine.durable.last_commit and engine.durable.last_commit.step)
    assert steps == [None, None, 3, 3]
    engine.backward(engine(batch(4)))
    with pytest.raises(RuntimeError, match="1 micro-batches are accumulated"):
        engine.durable.commit()
    engine.step()
    assert engine.durable.commit().step == 5
    engine.destroy()
    again = begin(durable_config(str(place), "run", "host"), seed=3)
    assert again.global_steps == 5
    again.destroy()


def test_a_durable_run_needs_an_optimizer_and_named_files(place: Path) -> None:
    config = durable_config(str(place), "run", "device")
    del config["optimizer"], config["scheduler"]
    with pytest.raises(zero.ConfigError, match="has no optimizer"):
        begin(config)
    with pytest.raises(ValueError, match="only if it is given a Platter"):
        begin(durable_config(str(place), "run", "device"), io_engine=SimulatedDisk(0))


@pytest.mark.filterwarnings("ignore:.*lie on the same device:RuntimeWarning")
def test_a_striped_run_is_kept_on_every_drive(place: Path, wanted: dict[str, list[str]]) -> None:
    config = durable_config(str(place), "run", "nvme")
    config["tiers"]["nvme"] = [
        {"path": str(place / name), "weight": weight} for name, weight in (("a", 1.0), ("b", 2.0))
    ]
    for name in "ab":
        (place / name).mkdir()
    for section in ("offload_param", "offload_optimizer"):
        del config["zero_optimization"][section]["nvme_path"]
    engine = begin(config)
    synced = []
    file = engine._runtime.store.swap_file
    assert isinstance(file, StripedFile)
    for member in file.members:
        member.sync = lambda member=member, sync=member.sync: (synced.append(member), sync())
    run_step(engine)
    assert synced == list(file.members)
    run_step(engine)
    engine.destroy()
    sizes = [(place / name / "run" / "rank-0" / "swap-1").stat().st_size for name in "ab"]
    assert sum(sizes) == engine.plan.memory.swap_file_bytes
    assert sizes[1] > sizes[0] > 0
    assert not any((place / "b" / "run" / "rank-0").glob("commit-*"))
    again = begin(config, seed=8)
    assert state_of(again) == wanted["nvme"][2]
    run_step(again)
    assert state_of(again) == wanted["nvme"][3]
    again.destroy()
    (place / "b" / "run" / "rank-0" / "swap-1").unlink()
    with pytest.raises(zero.DurableError, match="No such file"):
        begin(config)


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_a_checkpoint_of_a_durable_run_has_the_bits_of_its_step(
    place: Path, wanted: dict[str, list[str]], how: str
) -> None:
    engine = begin(durable_config(str(place), "run", "nvme"))
    run_step(engine)
    run_step(engine)
    engine.save_checkpoint(place / "saved", blocking=how == "blocking")
    run_step(engine)  # writes to the other copies, commits, and frees those that were saved
    assert state_of(engine) == wanted["nvme"][3]
    engine.wait_for_checkpoint()
    engine.destroy()
    plain = begin(durable_config(str(place), None, "nvme"), seed=6)
    plain.load_checkpoint(place / "saved")
    assert state_of(plain) == wanted["nvme"][2]
    plain.destroy()
    other = begin(durable_config(str(place), "other", "nvme"), seed=6)
    other.load_checkpoint(place / "saved")
    run_step(other)
    other.destroy()
    again = begin(durable_config(str(place), "other", "nvme"), seed=7)
    assert state_of(again) == wanted["nvme"][3]
    again.destroy()


TERMINATED = """
import signal, sys
import zero
from tests.support.durable import begin, durable_config, run_step
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
engine = begin(durable_config(sys.argv[1], "run", sys.argv[2], every_steps=100))
print("begun", flush=True)
sys.stdin.readline()
if "destroyed" in sys.argv:
    engine.destroy()
while True:
    run_step(engine)
"""


@pytest.mark.parametrize(
    ("mix", "handler", "code"),
    [("nvme", "default", -signal.SIGTERM), ("device", "own", 7), ("host", "destroyed", -15)],
)
def test_sigterm_commits_the_step_and_then_ends_as_it_would(
    place: Path, wanted: dict[str, list[str]], mix: str, handler: str, code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TERMINATED, str(place), mix, handler],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"begun\n"
        process.terminate()
        process.stdin.write(b"go\n")
        process.stdin.close()
        found = process.wait(60)
        assert found == code
    if handler == "destroyed":
        assert not any((place / "run" / "rank-0").glob("commit-*"))
    else:
        finish(place, mix, wanted[mix], at=1)
