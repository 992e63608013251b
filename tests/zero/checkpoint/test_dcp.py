"""torch.distributed.checkpoint: what we export plain torch reads, what it saves goes on here."""

from __future__ import annotations

import enum
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zero
from offload import process_bytes
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import as_bits, full_parameters, state_digest
from tests.support.observe import digest as content
from tests.support.tiny import TinyTransformer, make_batch
from zero.checkpoint import export_dcp, export_engine_dcp, load_dcp
from zero.checkpoint.__main__ import main as command
from zero.checkpoint.dcp_boxes import Box, boxes_of_range

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Model(TinyTransformer):
    """Tied, with a frozen block, a buffer, and parameters of odd sizes."""

    def __init__(self, *, freeze: bool = True) -> None:
        super().__init__(extra=(1, 2, 3, 129))
        self.register_buffer("seen", torch.arange(5))
        self.blocks[1].requires_grad_(requires_grad=not freeze)
        if not freeze:
            for block in self.blocks:
                block.nothing = nn.Parameter(torch.zeros(3))  # FSDP2 shards no empty ones


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Do once what every forked rank would do at its first engine."""
    zero.initialize(model=model(), config=make_config())[0].destroy()


def model(*, freeze: bool = True) -> Model:
    torch.manual_seed(5)
    return Model(freeze=freeze)


def config(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    options = {"parameters": tier, "optimizer": tier, **more}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 512, "host_memory": "200KB"}
    return make_config(clip=1.0, **options)


def train(engine: zero.ZeroEngine, first: int, last: int, rank: int = 0) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step, rank)))
        engine.step()


def quietly_load(engine: zero.ZeroEngine, folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load_dcp(engine, folder, **options)


@given(st.data())
def test_boxes_make_up_a_range(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    numel = torch.Size(shape).numel()
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    values = torch.arange(numel).view(shape)
    whole = Box((0,) * len(shape), tuple(shape))
    found = []
    for first, box in boxes_of_range(shape, start, stop):
        part = whole.of(values, box)
        assert part.is_contiguous()
        assert int(part.reshape(-1)[0]) == first
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


@pytest.mark.nvme
def test_what_is_exported_plain_torch_reads(scratch: Path) -> None:
    """Saved and exported by two ranks, read by plain torch without any."""

    def work(rank: int) -> dict[str, list[float]]:
        engine = zero.initialize(model=model(), config=config("nvme", scratch))[0]
        train(engine, 0, 3, rank)
        export_engine_dcp(engine, scratch / "live")
        engine.save_checkpoint(scratch / "ck")
        found = {
            f"{state.name} {key}": getattr(state, key).reshape(-1).tolist()
            for state in zero.iterate_states(engine.module)
            for key in ("fp32_param", "exp_avg", "exp_avg_sq")
            if getattr(state, key) is not None
        }
        engine.destroy()
        return found

    expected = on_ranks(work, 2, scratch)[0]
    export_dcp(scratch / "ck", scratch / "offline")
    assert len(list((scratch / "live").glob("*.distcp"))) == 2
    for folder in (scratch / "live", scratch / "offline"):
        plain = model()
        optimizer = torch.optim.AdamW(
            [each for each in plain.parameters() if each.requires_grad], LR
        )
        weights, states = get_state_dict(plain, optimizer)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=folder, no_dist=True)
        assert set(weights) == set(model().state_dict())
        for key, values in expected.items():
            name, what = key.split(" ")
            tensor = weights[name] if what == "fp32_param" else states["state"][name][what]
            assert torch.equal(tensor.reshape(-1), torch.tensor(values)), (name, what)
        assert {float(each["step"]) for each in states["state"].values()} == {3.0}
        (group,) = states["param_groups"]
        assert (group["lr"], group["weight_decay"]) == (LR, WEIGHT_DECAY)
        assert torch.equal(weights["seen"], torch.arange(5))
    dcp_to_torch_save(scratch / "live", scratch / "whole.pt")
    whole = torch.load(scratch / "whole.pt", weights_only=True)
    assert torch.equal(whole["model"]["head.weight"], whole["model"]["embedding.weight"])
    assert whole["optim"]["state"]["embedding.weight"]["exp_avg"].abs().sum() > 0
    leftovers = [each.name for each in scratch.iterdir() if each.name.startswith(".dcp")]
    assert leftovers == []


@pytest.mark.nvme
def test_an_export_goes_on_bit_for_bit_at_other_ranks_and_tiers(scratch: Path) -> None:
    def first(rank: int) -> list[str]:
        engine = zero.initialize(model=model(), config=config("nvme", scratch, dtype="bf16"))[0]
        train(engine, 0, 3, rank)
        export_engine_dcp(engine, scratch / "dcp")
        found = [state_digest(engine), content(full_parameters(engine))]
        engine.destroy()
        return found

    saved = on_ranks(first, 2, scratch)

    def again(tier: str, stage: int) -> Any:
        def work(rank: int) -> str:
            given = config(tier, scratch, dtype="bf16", stage=stage)
            engine = zero.initialize(model=model(), config=given)[0]
            train(engine, 0, 1, rank)  # it has something to lose
            quietly_load(engine, scratch / "dcp")
            assert (engine.global_steps, engine._history.updates) == (3, 3)
            assert not any("loss scale" in note for note in engine.resume_report)
            digest = state_digest(engine)
            if stage < 3:  # this rank's own copies, which nobody gathers
                named = engine.module.named_parameters()
                held = {name: as_bits(parameter) for name, parameter in named}
                assert content(held) == saved[0][1]
            train(engine, 3, 4, rank)
            engine.destroy()
            return digest

        return work

    for tier, world_size, stage in (("cpu", 1, 3), ("nvme", 3, 3), ("none", 2, 2)):
        found = on_ranks(again(tier, stage), world_size, scratch)
        assert set(found) == {digest for digest, _ in saved}, (tier, world_size)


def peer(rank: int, folder: Path, *, flatten: bool, sharded: bool) -> dict[str, list[float]]:
    """Train with plain torch, save with DCP, train on, and return the weights then."""
    net = model(freeze=False)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(
        net.parameters(), LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    for step in range(5):
        if step == 3:
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            weights, states = get_state_dict(net, optimizer, options=options)
            dcp.save(
                {"app": {"model": weights, "optim": states}, "epoch": 2},
                checkpoint_id=folder,
                no_dist=not sharded,
            )
        net(*make_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).reshape(-1).tolist()
        for name, each in net.state_dict().items()
    }


@pytest.mark.nvme
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_plain_torch_saved_goes_on_here(ranks: int, scratch: Path) -> None:
    folder = scratch / "peer"
    flatten = ranks > 1

    def theirs(rank: int) -> dict[str, list[float]]:
        return peer(rank, folder, flatten=flatten, sharded=ranks > 1)

    expected = on_ranks(theirs, ranks, scratch)[0]
    given = make_config(parameters="nvme", optimizer="nvme", nvme_path=str(scratch))
    given["optimizer"]["params"]["lr"] = 0.5  # the saved one is taken over
    engine = zero.initialize(model=model(freeze=False), config=given)[0]
    quietly_load(engine, folder)
    weights = {state.name: state.fp32_param for state in zero.iterate_states(engine.module)}
    saved: dict[str, Any] = {"app": {"model": model(freeze=False).state_dict()}}
    dcp.load(saved, checkpoint_id=folder, no_dist=True)
    for name, tensor in weights.items():
        assert torch.equal(tensor, saved["app"]["model"][name]), name
    assert engine.optimizer.param_groups[0]["lr"] == LR
    assert engine.global_steps == 3
    train(engine, 3, 5)
    for name, tensor in engine.module.state_dict().items():
        theirs_now = torch.tensor(expected[name], dtype=tensor.dtype)
        torch.testing.assert_close(tensor.reshape(-1), theirs_now, rtol=0, atol=1e-5)
    engine.destroy()


@pytest.mark.nvme
def test_an_export_is_read_into_dtensors_of_two_ranks(scratch: Path) -> None:
    engine = zero.initialize(model=model(freeze=False), config=make_config())[0]
    train(engine, 0, 2)
    engine.save_checkpoint(scratch / "ck")
    expected = {state.name: state.exp_avg for state in zero.iterate_states(engine.module)}
    engine.destroy()
    assert command(["export-dcp", str(scratch / "ck"), str(scratch / "dcp")]) == 0
    assert command(["export-dcp", str(scratch / "ck"), str(scratch / "dcp")]) == 1

    def work(rank: int) -> None:
        net = model(freeze=False)
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(net.parameters(), 0.5)
        weights, states = get_state_dict(net, optimizer)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=scratch / "dcp")
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)
        assert optimizer.param_groups[0]["lr"] == LR
        names = {id(each): name for name, each in net.named_parameters()}
        for parameter, state in optimizer.state.items():
            found = state["exp_avg"].full_tensor()
            assert torch.equal(found, expected[names[id(parameter)]])
        assert len(optimizer.state) == len(expected)

    on_ranks(work, 2, scratch)


@pytest.mark.full
@pytest.mark.nvme
def test_memory_is_a_few_chunks_both_ways(scratch: Path) -> None:
    """480 MB of state, whose chunks are 17 MB: each way takes less than a third of it."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    def grown(work: Any) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        before = process_bytes("VmRSS")["VmRSS"]
        work()
        return process_bytes("VmHWM")["VmHWM"] - before

    def steps(rank: int) -> list[int]:
        given = config("nvme", scratch) | {"train_micro_batch_size_per_gpu": 1}
        given["tiers"] |= {"host_memory": "150MB"}
        given["zero_optimization"]["sub_group_size"] = 5_000_000
        engine = zero.initialize(model=Deep(), config=given)[0]
        engine.backward(engine(torch.ones(1, 2048)))
        engine.step()
        engine.save_checkpoint(scratch / "ck")
        export_dcp(scratch / "ck", scratch / "warm")  # what is loaded is loaded
        out = grown(lambda: export_dcp(scratch / "ck", scratch / "dcp"))
        back = grown(lambda: quietly_load(engine, scratch / "dcp"))
        engine.destroy()
        return [out, back]

    (found,) = on_ranks(steps, 1, scratch)
    size = sum(each.stat().st_size for each in (scratch / "dcp").iterdir())
    assert size > 480e6
    assert max(found) < 160e6, found


def save_plain(folder: Path, **changes: torch.Tensor) -> dict[str, Any]:
    net = model(freeze=False)
    optimizer = torch.optim.AdamW(net.parameters(), LR)
    net(*make_batch(0)).backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer)
    document = {"model": {**weights, **changes}, "optim": states}
    dcp.save(document, checkpoint_id=folder, no_dist=True)
    return document


class Bomb:
    """A pickle that would run something."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["DCP_BOMB"],)


def test_what_cannot_be_used_is_refused_and_nothing_changes(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_BOMB", str(scratch / "exploded"))
    engine = zero.initialize(model=model(freeze=False), config=make_config())[0]
    train(engine, 0, 1)
    digest = state_digest(engine)

    def refused(name: str, match: str, **options: Any) -> None:
        with pytest.raises(zero.CheckpointError, match=match):
            quietly_load(engine, scratch / name, **options)
        assert state_digest(engine) == digest

    with pytest.raises(
        zero.CheckpointError, match="load_dcp: the folder is None, a NoneType; give"
    ):
        load_dcp(engine, None)  # type: ignore[arg-type]
    with pytest.raises(zero.CheckpointError, match="export_dcp: the checkpoint is 3, a int; give"):
        export_dcp(3, scratch / "nowhere")  # type: ignore[arg-type]
    (scratch / "empty").mkdir()
    refused("empty", "has no .metadata")
    save_plain(scratch / "shape", **{"norm.weight": torch.ones(3)})
    refused("shape", r"norm.weight has shape .*16.*, there \(3,\)")
    save_plain(scratch / "foreign", other=torch.ones(3))
    refused("foreign", "other is not in the model")
    save_plain(scratch / "short")
    data = scratch / "short" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-2000])
    refused("short", "was cut short")
    metadata = scratch / "short" / ".metadata"
    metadata.write_bytes(pickle.dumps(Bomb()))
    refused("short", "names (posix|os).mkdir")
    document = save_plain(scratch / "bomb")
    del document["optim"]["state"]["norm.weight"]["exp_avg"]
    dcp.save(document, checkpoint_id=scratch / "lacks", no_dist=True)
    refused("lacks", "lacks exp_avg of norm.weight")
    assert not (scratch / "exploded").exists()
    del document["model"]["norm.weight"]
    dcp.save(document, checkpoint_id=scratch / "less", no_dist=True)
    refused("less", "norm.weight is not in it")
    engine.destroy()


def test_a_bomb_among_the_values_is_not_run(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_BOMB", str(scratch / "exploded"))
    save_plain(scratch / "dcp")
    found = dcp.FileSystemReader(scratch / "dcp").read_metadata()
    place = next(
        info for index, info in found.storage_data.items() if index.fqn.endswith("groups.0.betas")
    )
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    data = scratch / "dcp" / place.relative_path
    place.offset, place.length = data.stat().st_size, len(buffer.getvalue())
    with data.open("ab") as file:
        file.write(buffer.getvalue())
    (scratch / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    engine = zero.initialize(model=model(freeze=False), config=make_config())[0]
    with pytest.raises(zero.CheckpointError, match=r"betas names (posix|os)\.mkdir"):
        quietly_load(engine, scratch / "dcp")
    place.relative_path = "../../etc/passwd"
    (scratch / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(zero.CheckpointError, match="plain names in its own folder"):
        quietly_load(engine, scratch / "dcp")
    assert not (scratch / "exploded").exists()
    engine.destroy()


class OlderPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_what_an_older_python_saved_is_read(scratch: Path) -> None:
    document = save_plain(scratch / "dcp")
    path = scratch / "dcp" / ".metadata"
    found = pickle.loads(path.read_bytes())  # written just above
    with path.open("wb") as file:
        OlderPickler(file).dump(found)
    assert b"getattr" in path.read_bytes()
    engine = zero.initialize(model=model(freeze=False), config=make_config())[0]
    quietly_load(engine, scratch / "dcp")
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, document["model"][name]), name
    with path.open("wb") as file:
        file.write(pickle.dumps(getattr).removesuffix(b".") + b"(X\x03\0\0\0strX\x04\0\0\0jointR.")
    with pytest.raises(zero.CheckpointError, match=r"names builtins\.getattr"):
        quietly_load(engine, scratch / "dcp")
    engine.destroy()


def test_weights_alone_and_what_was_tied_differently(scratch: Path) -> None:
    save_plain(scratch / "dcp")
    engine = zero.initialize(model=model(freeze=False), config=make_config())[0]
    quietly_load(engine, scratch / "dcp", optimizer_states=False)
    assert (engine.global_steps, engine._history.updates) == (0, 0)
    torn = nn.Parameter(torch.ones(31, 16))
    save_plain(scratch / "untied", **{"head.weight": torn.detach()})
    with pytest.raises(zero.CheckpointError, match=r"are one parameter here.*untie them"):
        quietly_load(engine, scratch / "untied", optimizer_states=False)
    with pytest.raises(zero.CheckpointError, match="is there already"):
        export_engine_dcp(engine, scratch / "dcp")
    engine.destroy()
