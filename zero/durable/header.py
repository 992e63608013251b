"""What a manifest says of the run beside its copies: plain data, and tensors as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from estimators import DriveRates, MemoryPlan
from zero.run_state import RunState


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What must be the same when a run is resumed, and where its swap file is."""

    world_size: int
    model: str
    file: dict[str, Any]
    host_bytes: int
    rates: tuple[float, float, str] | None

    @classmethod
    def of(cls, plan: MemoryPlan, model: str, file: dict[str, Any]) -> RunFacts:
        """Return the facts of a run that is planned."""
        rates = plan.request.rates
        known = None
        if rates is not None:
            known = (rates.read_bytes_per_s, rates.write_bytes_per_s, rates.source)
        return cls(plan.request.world_size, model, file, plan.host_budget_bytes, known)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> RunFacts:
        """Return the facts that a manifest has."""
        found = dict(header["run"])
        rates = found.pop("rates")
        return cls(rates=tuple(rates) if rates is not None else None, **found)

    def to_header(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return {
            "world_size": self.world_size,
            "model": self.model,
            "file": self.file,
            "host_bytes": self.host_bytes,
            "rates": list(self.rates) if self.rates is not None else None,
        }

    @property
    def drive_rates(self) -> DriveRates | None:
        """The rates that the plan was made from."""
        return DriveRates(*self.rates) if self.rates is not None else None


def pack_state(state: RunState) -> tuple[dict[str, Any], bytes]:
    """Return a run state as plain data, and the bytes of its tensors."""
    index: list[tuple[str, str, list[int], int]] = []
    parts: list[bytes] = []
    for name, tensor in state.tensors.items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        index.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(raw)))
        parts.append(raw)
    return {"data": state.to_json(), "tensors": index}, b"".join(parts)


def unpack_state(packed: Mapping[str, Any], blob: bytes) -> RunState:
    """Return the run state that `pack_state` took apart.

    Raises:
        RunStateError: if another version wrote it.
    """
    tensors = {}
    start = 0
    entries: Sequence[tuple[str, str, list[int], int]] = packed["tensors"]
    for name, dtype, shape, size in entries:
        tensors[name] = _tensor(blob[start : start + size], getattr(torch, dtype), shape)
        start += size
    return RunState.from_json(packed["data"], tensors)


def _tensor(raw: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not raw:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tuple(shape))
