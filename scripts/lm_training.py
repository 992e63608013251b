"""The training loop of train_lm.py: steps and their measures, stopping, generation."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from lm_report import WAITS, ProgressLine, StepReport
from lm_text import Text
from torch import Tensor


class StopSignals:
    """Turns the first Ctrl-C or SIGTERM into a wish to stop after the current step.

    A second one, when the first had a second to work, raises KeyboardInterrupt at once. (A launcher
    passes on what the terminal has sent already, so two at the same time count as one.)
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received is None:
            self.received = number
            self._since = time.monotonic()
        elif time.monotonic() - self._since > 1:
            raise KeyboardInterrupt


@dataclass(slots=True)
class Trainer:
    """Runs an engine over random windows of a text and measures each step."""

    engine: Any
    text: Text
    sequence: int
    seed: int
    stop: StopSignals
    phases: dict[str, float] = field(
        default_factory=lambda: {"forward": 0.0, "backward": 0.0, "optimizer step": 0.0}
    )
    _generator: random.Random = field(init=False)
    _stopping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._generator = random.Random(self.seed * 1_000_003 + self.engine.global_rank)

    def run(self, steps: int, progress: ProgressLine) -> list[StepReport]:
        """Train for `steps` steps, or until a stop is asked for on any rank."""
        self.engine.train()
        reports: list[StepReport] = []
        while len(reports) < steps and not self._stopping:
            reports.append(self._step(len(reports) + 1))
            progress.show(reports[-1])
        return reports

    def _step(self, number: int) -> StepReport:
        before = self.engine.ledger.snapshot()
        started = time.perf_counter()
        micro_batches = self.engine.gradient_accumulation_steps()
        batch = self.engine.train_micro_batch_size_per_gpu()
        losses: list[Tensor] = []
        for _ in range(micro_batches):
            inputs, targets = self._batch(batch)
            with self._phase("forward"):
                loss = self.engine(inputs, targets)
            with self._phase("backward"):
                self.engine.backward(loss)
            self.engine.ledger.count_tokens(inputs.numel())
            with self._phase("optimizer step"):
                self.engine.step()
            losses.append(loss.detach())
        mean_loss = self._agree(torch.stack(losses).float().mean())
        moved = self.engine.ledger.snapshot().minus(before)
        return StepReport(
            step=number,
            loss=mean_loss,
            seconds=time.perf_counter() - started,
            tokens=micro_batches * batch * self.sequence * self.engine.world_size,
            read_bytes=moved.nvme_read_bytes,
            write_bytes=moved.nvme_write_bytes,
            stall_seconds=sum(moved.seconds.get(name, 0.0) for name in WAITS),
        )

    def _batch(self, count: int) -> tuple[Tensor, Tensor]:
        windows = self.text.windows(count, self.sequence + 1, self._generator)
        joined = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8)
        rows = joined.view(count, self.sequence + 1).long().to(device_of(self.engine))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - started

    def _agree(self, loss: Tensor) -> float:
        """Average the loss over the ranks, and let all of them stop in the same step."""
        wish = float(self.stop.received is not None)
        if self.engine.world_size > 1:
            shared = torch.stack([loss, loss.new_tensor(wish)])
            torch.distributed.all_reduce(shared)
            loss, wish = shared[0] / self.engine.world_size, float(shared[1])
        self._stopping = wish > 0
        return float(loss)

    @property
    def stopped(self) -> bool:
        """Whether the last step ended with the agreement of all ranks to stop."""
        return self._stopping


def device_of(engine: Any) -> torch.device:
    """Return where an engine takes its inputs."""
    device: torch.device = getattr(engine, "device", torch.device("cpu"))
    return device


@torch.no_grad()
def generate(engine: Any, prompt: bytes, count: int, sequence: int, seed: int) -> bytes:
    """Return `count` bytes that the model continues `prompt` with; every rank must call this."""
    engine.eval()
    generator = torch.Generator().manual_seed(seed)
    written = bytearray(prompt)
    for _ in range(count):
        context = torch.tensor([list(written[-sequence:])], device=device_of(engine))
        logits = engine(context)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / 0.8, dim=0)
        written.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(written[len(prompt) :])
