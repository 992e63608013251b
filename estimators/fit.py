"""The inverse: what of a model fits a machine, fastest first, and what more would buy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from estimators.activations import Batch
from estimators.estimate import PROCESS_BYTES, Estimate, estimate_placed, place
from estimators.formats import ElementType, StateFormat, record_layout
from estimators.inputs import DeviceKind, Node, PlanInputs
from estimators.models import PRESETS, ModelShape, preset
from estimators.placement import PlanError
from estimators.segments import Tier
from estimators.step_time import moved
from estimators.summary import MemoryPlan

EXACT_FORMATS = (
    StateFormat.EXACT,
    *(each for each in StateFormat if not each.is_lossy and each is not StateFormat.EXACT),
)
"""Formats that keep every bit of the master; the others are offered only where asked for."""

HOST_SHARE = 0.8
"""Share of a node's memory that is planned; the rest is for the system, Python and the batch."""

Way: TypeAlias = tuple[int, Tier, Tier]
"""ZeRO stage, and the lowest tiers of parameters and of gradients and state."""

_WAYS: tuple[Way, ...] = (
    (2, Tier.DEVICE, Tier.DEVICE),
    (2, Tier.DEVICE, Tier.HOST),
    (3, Tier.DEVICE, Tier.DEVICE),
    (3, Tier.DEVICE, Tier.HOST),
    (3, Tier.HOST, Tier.HOST),
    (3, Tier.DEVICE, Tier.NVME),
    (3, Tier.HOST, Tier.NVME),
    (3, Tier.NVME, Tier.NVME),
)
_MOST_SAMPLES = 1 << 12


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for, whatever the placement."""

    sequence: int = 4096
    samples: int | None = None
    """Micro-batch of a rank; None takes the one that is fastest."""
    train_batch_size: int | None = None
    """Samples of a step of all ranks; None takes one micro-batch a rank."""
    element: ElementType = ElementType.BF16
    formats: tuple[StateFormat, ...] = EXACT_FORMATS

    def __post_init__(self) -> None:
        if self.train_batch_size is not None and self.train_batch_size < 1:
            raise ValueError(
                f"a step needs at least one sample, got {self.train_batch_size}; leave it out for"
                " one micro-batch a rank"
            )


@dataclass(frozen=True)
class Choice:
    """One way to train that fits, with its estimate."""

    estimate: Estimate

    @property
    def inputs(self) -> PlanInputs:
        """What the estimate was made from."""
        return self.estimate.inputs

    @property
    def tokens_per_second(self) -> float:
        """Expected pace of the whole job; of a model of which only sizes are known, at most."""
        seconds = self.estimate.time.expected
        return self.estimate.tokens_per_step / seconds if seconds else float("inf")


def budget_of(memory_bytes: int, ranks: int) -> int:
    """Return the host budget to plan with on a node of so much memory."""
    return max(int(HOST_SHARE * memory_bytes) - ranks * PROCESS_BYTES, 0)


def choices(model: ModelShape, node: Node, wanted: Wanted) -> list[Choice]:
    """Return every way that fits, fastest first; `node.host_bytes` is the budget to plan with.

    Of one placement and format the fastest micro-batch is taken, with and without checkpointing.
    """
    if _least_bytes(model, wanted) > _room_bytes(node):
        return []
    found: list[Choice] = []
    for split in _splits(node):
        for placed in _placed(model, split, wanted):
            found += _batches(*placed, wanted)
        if found:
            break
    return sorted(found, key=lambda choice: (-choice.tokens_per_second, _rank(choice)))


def nearest_problem(model: ModelShape, node: Node, wanted: Wanted) -> str:
    """Say why nothing fits: what the way that needs least, with all of it on NVMe, lacks."""
    smallest = replace(wanted, samples=wanted.samples or 1)
    if not any(_accumulation(wanted, node, samples) for samples in _samples(wanted, model)):
        return (
            f"{wanted.train_batch_size} samples of a step do not divide into micro-batches of"
            f" {wanted.samples or 'any power of two'} on {node.world_size} ranks"
        )
    inputs = _inputs(model, node, smallest, _WAYS[-1], wanted.formats[0])
    inputs = replace(inputs, batch=replace(inputs.batch, checkpointing=True))
    try:
        found = estimate_placed(inputs, place(inputs)).problems()
    except PlanError as error:
        return str(error)
    return found[0] if found else "no placement was found"


def _rank(choice: Choice) -> tuple[int, int]:
    """Order ways that are as fast: less offloaded first, then the format named first."""
    inputs = choice.inputs
    way = (inputs.stage, inputs.parameter_tier, inputs.optimizer_tier)
    return _WAYS.index(way), list(StateFormat).index(inputs.state_format)


def _inputs(
    model: ModelShape,
    node: Node,
    wanted: Wanted,
    way: Way,
    state_format: StateFormat,
) -> PlanInputs:
    return PlanInputs(
        model=model,
        node=node,
        batch=Batch(wanted.samples or 1, wanted.sequence),
        accumulation_steps=_accumulation(wanted, node, wanted.samples or 1) or 1,
        element=wanted.element,
        stage=way[0],
        parameter_tier=way[1],
        optimizer_tier=way[2],
        state_format=state_format,
    )


def _accumulation(wanted: Wanted, node: Node, samples: int) -> int | None:
    """Return the micro-batches of a step; None if they do not add up to what is wanted."""
    if wanted.train_batch_size is None:
        return 1
    share, rest = divmod(wanted.train_batch_size, samples * node.world_size)
    return share if share and not rest else None


def _placed(
    model: ModelShape,
    node: Node,
    wanted: Wanted,
    order: Iterable[Way] = _WAYS,
) -> Iterator[tuple[PlanInputs, MemoryPlan]]:
    formats = wanted.formats if wanted.element is ElementType.BF16 else wanted.formats[:1]
    for way in order:
        if node.nvme_bytes == 0 and Tier.NVME in way:
            continue
        if node.world_size == 1 and way[0] < 3:
            continue  # one rank shards nothing
        if node.device is DeviceKind.CPU and Tier.DEVICE in way:
            continue  # the device is host memory: the budget would not bound it
        for state_format in formats:
            inputs = _inputs(model, node, wanted, way, state_format)
            try:
                memory = place(inputs)
            except PlanError:
                continue
            yield inputs, memory


def _batches(inputs: PlanInputs, memory: MemoryPlan, wanted: Wanted) -> Iterator[Choice]:
    usual = moved(memory, inputs.accumulation_steps)
    for checkpointing in (False, True) if inputs.model.stacks else (False,):
        fitting = []
        for samples in _samples(wanted, inputs.model):
            steps = _accumulation(wanted, inputs.node, samples)
            if steps is None:
                continue
            changed = replace(
                inputs,
                batch=replace(inputs.batch, samples=samples, checkpointing=checkpointing),
                accumulation_steps=steps,
            )
            known = usual if steps == inputs.accumulation_steps else moved(memory, steps)
            made = estimate_placed(changed, memory, known)
            if made.problems():
                break
            fitting.append(Choice(made))
        if fitting:
            yield max(fitting, key=lambda choice: choice.tokens_per_second)


def _samples(wanted: Wanted, model: ModelShape) -> Sequence[int]:
    if wanted.samples is not None:
        return (wanted.samples,)
    if not model.stacks:
        return (1,)  # what a sample takes and how long it lasts is not known
    most = wanted.train_batch_size or _MOST_SAMPLES
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def with_layers(model: ModelShape, factor: float) -> ModelShape:
    """Return a model of the same widths whose stacks have `factor` times as many blocks."""
    kept: list[str] = []
    counts = {}
    containers: dict[str, list[str]] = {}
    for block in model.blocks:
        containers.setdefault(block.rpartition(".")[0], []).append(block)
    for container, blocks in containers.items():
        counts[container] = max(round(len(blocks) * factor), 1)
        kept += blocks[: counts[container]]
    wanted = set(kept)
    parameters = [each for each in model.parameters if not each.block or each.block in wanted]
    for container, blocks in containers.items():
        last = [each for each in model.parameters if each.block == blocks[-1]]
        for index in range(len(blocks), counts[container]):
            name = f"{container}.{index}"
            parameters += [
                replace(each, block=name, name=name + each.name.removeprefix(blocks[-1]))
                for each in last
            ]
    stacks = [replace(each, count=max(round(each.count * factor), 1)) for each in model.stacks]
    return replace(model, parameters=tuple(parameters), stacks=tuple(stacks))


def fits(model: ModelShape, node: Node, wanted: Wanted) -> bool:
    """Tell whether a model can be trained at all: a batch of one, checkpointing, any placement."""
    smallest = replace(wanted, samples=wanted.samples or 1)
    if _least_bytes(model, wanted) > _room_bytes(node):
        return False
    for split in _splits(node):
        for inputs, memory in _placed(model, split, smallest, reversed(_WAYS)):
            batch = replace(inputs.batch, checkpointing=True)
            if not estimate_placed(replace(inputs, batch=batch), memory).problems():
                return True
    return False


def _splits(node: Node) -> Iterator[Node]:
    """Yield the node with the budget for its tiers, then with less of it.

    On a processor what a device would hold takes of the same memory.
    """
    yield node
    if node.device is DeviceKind.CPU and node.host_bytes is not None:
        for share in (2, 4, 8):
            yield replace(node, host_bytes=node.host_bytes // share)


def _least_bytes(model: ModelShape, wanted: Wanted) -> int:
    """Return what parameters, gradients and state take at least, wherever they rest."""
    size = wanted.element.size_bytes
    state = min(
        record_layout(each, wanted.element, 1 << 20).size_bytes >> 20 for each in wanted.formats
    )
    return model.numel * (2 * size + state)


def _room_bytes(node: Node) -> float:
    """Return what all tiers of all nodes hold together."""
    device = node.device_bytes if node.device is DeviceKind.CUDA else 0
    rooms = (node.host_bytes, node.nvme_bytes, None if device is None else device * node.gpus)
    return node.count * sum(float("inf") if room is None else room for room in rooms)


def deepest(model: ModelShape, node: Node, wanted: Wanted) -> ModelShape | None:
    """Return the deepest model of the same widths that fits, to 3 %; None if none does."""
    count = max((stack.count for stack in model.stacks), default=0)
    if not count or not fits(with_layers(model, 1 / count), node, wanted):
        return None
    room = min(_room_bytes(node), float(1 << 50))
    high = int(count * room / _least_bytes(model, wanted)) + 2
    low = 1
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if fits(with_layers(model, middle / count), node, wanted):
            low = middle
        else:
            high = middle
    return with_layers(model, low / count)


def largest_preset(node: Node, wanted: Wanted) -> ModelShape | None:
    """Return the largest well-known model that fits; None if none does."""
    models = sorted((preset(name) for name in PRESETS), key=lambda model: -model.numel)
    for model in models:
        if fits(model, node, wanted):
            return model
    return None


@dataclass(frozen=True)
class Purchase:
    """What a change of the machine does."""

    what: str
    best: Choice | None
    """None: still nothing fits."""


def purchases(model: ModelShape, node: Node, wanted: Wanted) -> list[Purchase]:
    """Return what twice of each resource, one at a time, would do, in the first format."""
    rates = node.bandwidths
    drive = replace(
        rates.drive,
        read_bytes_per_s=2 * rates.drive.read_bytes_per_s,
        write_bytes_per_s=2 * rates.drive.write_bytes_per_s,
    )
    mixed = rates.mixed_bytes_per_s
    faster = replace(rates, drive=drive, mixed_bytes_per_s=2 * mixed if mixed else None)
    options = {"twice the GPUs in the node": replace(node, gpus=2 * node.gpus)}
    if node.device_bytes is not None and node.device is DeviceKind.CUDA:
        options["GPUs with twice the memory"] = replace(node, device_bytes=2 * node.device_bytes)
    if node.host_bytes is not None:
        whole = node.host_memory_bytes and 2 * node.host_memory_bytes
        options["twice the host memory"] = replace(
            node, host_bytes=2 * node.host_bytes, host_memory_bytes=whole
        )
    if node.nvme_bytes:
        options["drives twice as large"] = replace(node, nvme_bytes=2 * node.nvme_bytes)
        options["drives twice as fast"] = replace(node, bandwidths=faster)
    first = replace(wanted, formats=wanted.formats[:1])
    found = []
    for what, changed in options.items():
        best = next(iter(choices(model, changed, first)), None)
        found.append(Purchase(what, best))
    return found
