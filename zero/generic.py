"""Optimizers without a kernel: any element-wise `torch.optim.Optimizer` runs on the flat slices.

[Note: generic optimizers] What an optimizer keeps is found by running it on a small tensor before
anything is planned: tensors of the parameter's shape become fields of the records, what has one
element (a step count, a product of factors) is the same for all elements and is carried from step
to step. The same trial shows whether it is element-wise: halves of the tensor must come out as in
the whole. In a step the optimizer gets a copy of its group with one parameter, the fp32 master of a
slice. In its first step it finds no state, so it starts state as it likes.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from estimators import EXTRA_FIELDS, GenericRule
from offload import Field, GenericStep
from zero.errors import ConfigError

Group = Mapping[str, Any]

_TRIAL_SHAPE = (8, 8)
_TRIAL_STEPS = 4
# What selects an implementation; the plain one runs on slices.
_PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


_GIVEN = ("param_groups", "state")
"""Attributes of an optimizer that are set for each of its runs."""

_RESERVED = frozenset({"weight", "gradient", "run", "client", "fp32_param"})
"""Names that checkpoints, or users, have for something else."""

Since = Mapping[str, int]
"""The tensors that are kept of each element, and the step, from 1, that makes each."""


class GenericOptimizer:
    """An element-wise optimizer object, run on one slice at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = type(optimizer).__name__
        self._worker = bare_copy(optimizer)
        self._since: list[Since] = []
        self.beside: list[tuple[str, ...]] = []
        """By index of the group: names of the numbers that are carried beside the tensors."""
        self.names: list[str] = []
        self.defaults = dict(optimizer.defaults)
        self.carried: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        """By index and birth of an update group: its last step, and what it left."""
        self.admit(optimizer.param_groups)

    @property
    def rule(self) -> GenericRule:
        """What records keep for it."""
        return GenericRule(len(self.names))

    @property
    def states(self) -> Mapping[str, Field]:
        """The fields of what it keeps of each element, by the names of sections."""
        return {
            f"state.{name}" if name in _RESERVED else name: Field(field.value)
            for name, field in zip(self.names, EXTRA_FIELDS, strict=False)
        }

    def admit(self, groups: Sequence[Group]) -> None:
        """Find what it keeps for groups that it does not know yet.

        Raises:
            ConfigError: if there is no room for it, or it is not element-wise.
        """
        found = [_find_state(self._worker, group) for group in groups[len(self._since) :]]
        since = [each for each, _ in found]
        names = list(dict.fromkeys([*self.names, *(name for each in since for name in each)]))
        if len(names) > len(EXTRA_FIELDS):
            raise ConfigError(
                f"optimizer {self.name} keeps {len(names)} tensors of each parameter, and"
                f" there is room for {len(EXTRA_FIELDS)}; {_WAY_OUT}"
            )
        self._since += since
        self.beside += [beside for _, beside in found]
        self.names = names

    def scalars(
        self, index: int, group: Group, step: int, grad_scale: float, birth: int = 0
    ) -> GenericStep:
        """Return the step of a group, with the values that the group has now."""
        key = (index, birth)
        last, carried = self.carried.get(key, (0, {}))
        since = self._since[index]

        def run(master: Tensor, gradient: Tensor, tensors: dict[str, Tensor]) -> None:
            if last != step - 1:
                raise RuntimeError(
                    f"{self.name} is at step {step} of param_groups[{index}], and what it carries"
                    f" from step to step is that of step {last}; load a checkpoint of a run with"
                    f" {self.name}"
                )
            state: dict[str, Any] = copy.deepcopy(carried)
            state.update({name: tensors[name] for name in since if since[name] < step})
            after = run_step(self._worker, group, (master, gradient), state)
            self.carried[key] = (step, self._keep(after, tensors, since, step))

        return GenericStep(run, self.names, grad_scale)

    def _keep(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], since: Since, step: int
    ) -> dict[str, Any]:
        """Copy the state of the elements to their fields and return the rest."""
        rest = dict(state)
        fields = {each.untyped_storage().data_ptr() for each in tensors.values()}
        moves: list[tuple[Tensor, Tensor]] = []
        for name in since:
            found = rest.pop(name, None)
            if isinstance(found, Tensor) and found.data_ptr() != tensors[name].data_ptr():
                # An optimizer may exchange its tensors: what another field holds is copied first.
                lies_there = found.untyped_storage().data_ptr() in fields
                moves.append((tensors[name], found.clone() if lies_there else found))
        for target, found in moves:
            target.copy_(found)
        late = [name for name, value in rest.items() if _is_large(value)]
        if late:
            raise RuntimeError(
                f"{self.name} made {late[0]!r} in step {step}; state must be made within the first"
                f" {_TRIAL_STEPS} steps, so that there is memory for it"
            )
        return rest


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an object of the same class and attributes, whose groups and state can be set."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    # Not those of the optimizer, which refuse its step: a step may call that of its base class.
    made.__dict__["_optimizer_step_pre_hooks"] = collections.OrderedDict()
    made.__dict__["_optimizer_step_post_hooks"] = collections.OrderedDict()
    return made


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def run_step(
    worker: torch.optim.Optimizer,
    group: Group,
    operands: tuple[Tensor, Tensor],
    state: dict[str, Any],
) -> dict[str, Any]:
    """Run the optimizer's own step on one parameter and return the state that it leaves."""
    master, gradient = operands
    parameter = nn.Parameter(master)
    parameter.grad = gradient
    plain = {key: value for key, value in _PLAIN.items() if key in group}
    worker.param_groups = [{**group, **plain, "params": [parameter]}]
    worker.state = collections.defaultdict(dict, {parameter: state})
    step = type(worker).step
    with torch.no_grad(), _usual_defaults():
        # Without the wrapper that torch puts around it: no hooks, no profiler ranges.
        getattr(step, "__wrapped__", step)(worker)
    if parameter.data_ptr() != master.data_ptr():
        master.copy_(parameter.detach())
    return dict(worker.state.get(parameter, {}))


@contextlib.contextmanager
def _usual_defaults() -> Iterator[None]:
    """Let what a step makes without naming device and type be fp32 on the host, as its operands."""
    is_host = torch.get_default_device().type == "cpu"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.nullcontext() if is_host else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(default)


def refuse_side_effects(
    worker: torch.optim.Optimizer, group: Group, attributes: Mapping[str, Any]
) -> None:
    """Refuse what a step leaves outside of its state: it is run once a slice, or a parameter.

    Args:
        worker: what has just run.
        group: the group that it was given.
        attributes: its attributes before that.

    Raises:
        ValueError: naming what has changed.
    """
    left = {key: each for key, each in worker.param_groups[0].items() if key not in _PLAIN}
    changed = [key for key, each in left.items() if key != "params" and each is not group.get(key)]
    own = {key: each for key, each in vars(worker).items() if key not in _GIVEN}
    changed += [key for key, each in own.items() if each is not attributes.get(key)]
    (parameter,) = worker.param_groups[0]["params"]
    kept: Mapping[Any, Any] = worker.state
    beside = [key for key in kept if key is not parameter]
    changed += [key if isinstance(key, str) else "state of another parameter" for key in beside]
    if changed:
        raise ValueError(
            f"its step changes {changed[0]!r} of its group or of itself, which parameters share;"
            " keep it in its state, by parameter"
        )


def refuse_idle(group: Group, state: Mapping[str, Any], *, moved: bool) -> None:
    """Refuse a step that did nothing, as that of a wrapper around another optimizer does.

    Raises:
        ValueError: if the parameter has not moved, and nothing is kept of it.
    """
    if not moved and not state and group.get("lr", 1.0):
        raise ValueError(
            "its step does nothing to the parameters in its own param_groups; if it wraps another"
            " optimizer, pass that one"
        )


def _find_state(worker: torch.optim.Optimizer, given: Group) -> tuple[Since, tuple[str, ...]]:
    """Find what the optimizer keeps of each element, and that elements do not see each other.

    Returns:
        The tensors and the steps that make them, and names of the numbers beside them.

    Raises:
        ConfigError: if it is not element-wise, or keeps what cannot be stored.
    """
    name = type(worker).__name__
    group = {key: value for key, value in given.items() if key != "params"}
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(_TRIAL_SHAPE, generator=generator, dtype=torch.float32, device="cpu")
    gradients = [
        torch.randn(_TRIAL_SHAPE, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(_TRIAL_STEPS)
    ]
    flat, slices = [each.flatten() for each in gradients], (slice(0, 24), slice(24, None))
    try:
        whole, found, beside = _trial(worker, group, start, gradients)
        parts = [
            _trial(worker, group, start.flatten()[part], [each[part] for each in flat])[0]
            for part in slices
        ]
    except Exception as error:
        raise ConfigError(
            f"optimizer {name} cannot run on slices of parameters: {type(error).__name__}: {error};"
            f" {_WAY_OUT}"
        ) from error
    # Torch's vector and scalar code may differ by an ulp.
    if not torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-5, atol=1e-6):
        raise ConfigError(
            f"optimizer {name} is not element-wise: it updates an element otherwise where it sees"
            f" other elements of the tensor, and a rank has only a slice of it; {_WAY_OUT}, or say"
            " needs_whole_tensors = True in its class"
        )
    return found, beside


_WAY_OUT = (
    "use AdamW, Adam, Lion, Adagrad or SGD, which have kernels, or an element-wise optimizer, such"
    " as torch.optim.RMSprop"
)


def _trial(
    worker: torch.optim.Optimizer, group: Group, start: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, dict[str, int], tuple[str, ...]]:
    """Run a few steps on a tensor; return it, the state of its shape with its first step, others.

    The others are the names of what has one element.
    """
    master = start.clone()
    state: dict[str, Any] = {}
    found: dict[str, int] = {}
    for step, gradient in enumerate(gradients, start=1):
        before = dict(vars(worker))
        state = run_step(worker, group, (master, gradient.clone()), state)
        refuse_side_effects(worker, group, before)
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.numel() == 1:
                continue
            if value.shape != master.shape:
                raise ValueError(
                    f"its state {key!r} has the shape {tuple(value.shape)} for a parameter of"
                    f" {tuple(master.shape)}"
                )
            if not isinstance(key, str):
                raise TypeError(f"its state {key!r} is not named by a text")
            if value.dtype is not torch.float32:
                raise TypeError(f"its state {key!r} is {value.dtype}; torch.float32 can be stored")
            found.setdefault(key, step)
    moved = master._version > 0 or not torch.equal(master, start)
    refuse_idle(group, state, moved=moved)
    numbers = [key for key, value in state.items() if is_number(value) and key not in found]
    return master, found, tuple(numbers)


def is_number(value: object) -> bool:
    """Tell whether a value of a state can be read as a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float)
