"""Full weights for everybody: whole, tied and frozen ones too, in constant memory."""

from __future__ import annotations

import json
import resource
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero
from tests.aio_ops.disks import mounted
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.tiny import TinyTransformer, make_batch
from zero.checkpoint import convert
from zero.checkpoint.export_files import ExportEntry, parse_size, split_shards, write_file

pytestmark = pytest.mark.nvme


class Model(TinyTransformer):
    """Tied, a frozen block, an odd size, buffers of two types."""

    def __init__(self) -> None:
        super().__init__(extra=(37,))
        self.blocks[0].requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.register_buffer("count", torch.tensor(7))


def model() -> nn.Module:
    torch.manual_seed(2)
    return Model()


def trained(folder: Path, rank: int = 0, **options: Any) -> zero.ZeroEngine:
    engine = zero.initialize(model=model(), config=make_config(**options))[0]
    for step in range(2):
        engine.backward(engine(*make_batch(step, rank)))
        engine.step()
    return engine


def masters(engine: zero.ZeroEngine) -> dict[str, torch.Tensor]:
    """Return what fp32 weights must be, under every name."""
    found = {}
    for state in zero.iterate_states(engine.module):
        full = state.value if state.fp32_param is None else state.fp32_param
        found[state.name] = full.float()
    found["head.weight"] = found["embedding.weight"]
    return {**found, "scale": torch.full((3,), 1.5), "count": torch.tensor(7)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read exported files as anybody would."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    for path in sorted(folder.glob("*.bin")):
        found |= torch.load(path, weights_only=True)
        assert set(torch.load(path, weights_only=True, mmap=True)) <= set(found)
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text())["weight_map"]
        assert set(index) == set(found)
        assert {folder / name for name in index.values()} == set(folder.glob("*-of-*"))
    return found


def test_every_way_to_fp32_gives_the_masters(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(scratch, dtype="bf16")
    engine.save_checkpoint(scratch / "ck")
    expected = masters(engine)
    engine.destroy()
    assert_equal(zero.get_fp32_state_dict_from_zero_checkpoint(scratch / "ck"), expected)
    lazy = zero.get_fp32_state_dict_from_checkpoint(scratch / "ck", lazy_mode=True)
    assert lazy["embedding.weight"].shape == (31, 16)
    assert_equal(
        {k: v if isinstance(v, torch.Tensor) else v.contiguous() for k, v in lazy.items()}, expected
    )
    options = ["--max_shard_size", "10KB", "--safe_serialization"]
    script = scratch / "ck" / "zero_to_fp32.py"
    arguments = [str(script), str(scratch / "ck"), str(scratch / "out"), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert len(list((scratch / "out").glob("model-*-of-*.safetensors"))) > 1
    assert_equal(load_all(scratch / "out"), expected)
    for number, options in enumerate((["--max_shard_size", "9KB"], [])):
        out = scratch / f"bin{number}"
        assert convert.main([str(scratch / "ck"), str(out), *options]) == 0
        assert_equal(load_all(out), expected)
    whole = torch.load(scratch / "bin1" / "pytorch_model.bin", weights_only=True)
    tied = whole["head.weight"].data_ptr(), whole["embedding.weight"].data_ptr()
    assert tied[0] == tied[1]
    without = zero.get_fp32_state_dict_from_checkpoint(
        scratch / "ck", exclude_frozen_parameters=True
    )
    assert set(expected) - set(without) == {
        name for name in expected if name.startswith("blocks.0.")
    }
    plain = zero.load_state_dict_from_zero_checkpoint(model(), scratch / "ck")
    assert_equal({k: v.detach() for k, v in plain.state_dict().items()}, expected)
    assert convert.main([str(scratch / "nowhere"), str(scratch / "out2")]) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_live_model_is_written_whole(scratch: Path, world_size: int) -> None:
    def work(rank: int) -> None:
        engine = trained(scratch, rank, dtype="bf16")
        engine.backward(engine(*make_batch(3, rank)))  # in the middle of a window as well
        assert engine.save_16bit_model(scratch / "out")
        engine.save_16bit_model(scratch / "out", "some.safetensors")
        state = {key: value.clone() for key, value in engine.module.state_dict().items()}
        engine.save_checkpoint(scratch / "ck")
        if rank == 0:
            for name in ("pytorch_model.bin", "some.safetensors"):
                path = scratch / "out" / name
                found = load_file(path) if name.endswith("s") else torch.load(path)
                assert_equal(found, state)
            assert all(
                each.dtype in (torch.bfloat16, torch.float32, torch.int64)
                for each in found.values()
            )
            frozen = zero.load_weights(model(), scratch / "ck")
            assert not frozen.missing
        engine.destroy()

    on_ranks(work, world_size, scratch)


def test_no_room_leaves_nothing(scratch: Path) -> None:
    def work(_rank: int) -> list[str]:
        engine = trained(scratch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        said = []
        for name in ("a.safetensors", "a.bin"):
            try:
                engine.save_16bit_model(scratch / "out", name)
            except OSError as error:
                said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return [*said, *(path.name for path in (scratch / "out").iterdir())]

    assert len(on_ranks(work, 1, scratch)[0]) == 2


def test_sizes_and_shards() -> None:
    assert [parse_size(each) for each in ("5GB", "3 KiB", "7", 9)] == [5 * 10**9, 3072, 7, 9]
    for wrong in ("0GB", "5TB", "-1", "many"):
        with pytest.raises(ValueError, match="is no size"):
            parse_size(wrong)
    entries = [ExportEntry((str(n),), (n,), torch.float32) for n in (1, 2, 3, 9, 1)]
    shards = split_shards(entries, 16)
    assert [[entry.numel for entry in shard] for shard in shards] == [[1, 2], [3], [9], [1]]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_every_type_and_shape_is_written(tmp_path: Path, suffix: str) -> None:
    types = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in types
        for shape in ((), (0,), (3, 5), (1,))
    }
    entries = [ExportEntry((k,), tuple(v.shape), v.dtype) for k, v in tensors.items()]
    path = tmp_path / f"all.{suffix}"
    write_file(path, entries, lambda entry: iter([tensors[entry.names[0]].reshape(-1)]))
    assert_equal(load_file(path) if suffix[0] == "s" else torch.load(path), tensors)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_a_full_disk_is_named_and_left_as_it_was(suffix: str, scratch: Path) -> None:
    entries = [ExportEntry(("weight",), (50_000,), torch.float32)]
    with mounted(scratch / "small", "tmpfs", "size=64k") as folder:
        with pytest.raises(OSError, match=rf"\d+ bytes .*{folder}.*: No space left .*free some"):
            write_file(folder / f"model.{suffix}", entries, lambda _: iter([torch.zeros(50_000)]))
        assert list(folder.iterdir()) == []
