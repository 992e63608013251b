"""The optimizer that users hold: a `torch.optim.Optimizer` whose state lives on the tiers."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from estimators import ElementType, GenericRule, UpdateRule, WholeTensors
from estimators.models import ParameterShape
from offload import GenericStep, UpdateScalars
from zero.config.names import GENERIC_OPTIMIZERS as GENERIC_NAMES
from zero.config.names import WHOLE_OPTIMIZERS as WHOLE_NAMES
from zero.errors import ConfigError
from zero.generic import GenericOptimizer
from zero.lamb import Lamb
from zero.muon import make_muon
from zero.settings import NamedFactory
from zero.units import ManagedParameter
from zero.update_rules import FUSED, NAMES, FusedOptimizer, fused_by_name, fused_of
from zero.whole import WholeOptimizer, needs_whole_tensors


class ZeroOptimizer(torch.optim.Optimizer):
    """An update over sharded parameters; `param_groups` are read at each step."""

    def __init__(
        self,
        groups: Iterable[Any],
        defaults: dict[str, Any],
        fused: FusedOptimizer | GenericOptimizer | WholeOptimizer = FUSED[UpdateRule.ADAMW],
    ) -> None:
        super().__init__(groups, {**fused.defaults, **defaults})
        self.fused = fused
        self._is_attached = False
        self.has_new_groups = False
        """Whether groups were added that the engine has not planned for yet."""
        self._belongs: Callable[[torch.nn.Parameter], bool] | None = None
        self._run_step: Callable[[], None] | None = None
        self._drop_gradients: Callable[[], None] | None = None

    @property
    def type_name(self) -> str:
        """The optimizer as configurations call it."""
        return self.fused.name

    def attach(
        self,
        run_step: Callable[[], None],
        drop_gradients: Callable[[], None],
        belongs: Callable[[torch.nn.Parameter], bool],
    ) -> None:
        """Connect the optimizer with the engine that moves its state."""
        self._is_attached = True
        self._belongs = belongs
        self._run_step = run_step
        self._drop_gradients = drop_gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; an engine plans for it at its next step boundary.

        Raises:
            RuntimeError: if a parameter is not in the engine's model.
        """
        if not getattr(self, "_is_attached", False):
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        param_group = {
            **param_group,
            "params": [params] if isinstance(params, torch.Tensor) else list(params),
        }
        for parameter in param_group["params"]:
            if self._belongs is None or not self._belongs(parameter):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} cannot be added to the"
                    " optimizer: it is not in the engine's model"
                )
        super().add_param_group(param_group)
        self.has_new_groups = True

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the state lives on the tiers, and `engine.save_checkpoint` saves it.

        Raises:
            RuntimeError: always; an empty state would lose the moments without a word.
        """
        raise RuntimeError(
            "optimizer.state_dict: the optimizer state lives on the tiers of the engine; save it"
            " with engine.save_checkpoint(folder)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse, as `state_dict` does.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"optimizer.load_state_dict: a state of {len(state_dict)} entries cannot be loaded;"
            " load what engine.save_checkpoint saved with engine.load_checkpoint(folder)"
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do what `engine.step()` does; a closure is evaluated first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._run_step is None:
            raise RuntimeError("this optimizer belongs to no engine any more (destroyed?)")
        self._run_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own
        """Drop the gradients accumulated so far, as in torch."""
        if self._drop_gradients is not None:
            self._drop_gradients()
        super().zero_grad(set_to_none=set_to_none)

    def scalars(
        self, step: int, grad_scale: float, groups: Sequence[UpdateGroup]
    ) -> list[UpdateScalars | GenericStep]:
        """Return the scalars of the engine's step `step` (the first is 1), one per update group.

        Raises:
            ValueError: naming the group and the hyper-parameter that cannot be used.
        """
        if isinstance(self.fused, WholeOptimizer):
            raise TypeError(f"{self.fused.name} is not run on slices, so it has no scalars")
        return [
            self.fused.scalars(
                group.index,
                self.param_groups[group.index],
                step - group.birth,
                grad_scale,
                group.birth,
            )
            for group in groups
        ]


def make_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    model_parameters: Iterable[Any] | None,
    named: NamedFactory | None,
) -> ZeroOptimizer | None:
    """Return the optimizer to run: from the caller's object, else from the configuration.

    Returns:
        None if neither names one: the engine then only runs forward.

    Raises:
        ConfigError: if the optimizer is one that this version cannot run.
    """
    if optimizer is not None:
        if named is not None:
            warnings.warn(
                "the optimizer section of the configuration has no effect: an optimizer object was"
                " passed",
                UserWarning,
                stacklevel=3,
            )
        adopted = _adopt(optimizer)
        _check_membership(model, adopted)
        return adopted
    if named is None:
        return None
    fused = fused_by_name(named.type_name)
    if fused is None and named.type_name in (*GENERIC_NAMES, *WHOLE_NAMES):
        groups = list(model_parameters) if model_parameters is not None else list(_trainable(model))
        names = {id(each): name for name, each in model.named_parameters()}
        adopted = _adopt(_object_of(named, groups, names))
        _check_membership(model, adopted)
        return adopted
    if fused is None:
        raise ConfigError(
            f"optimizer.type {named.type_name!r} is not available in this version; use"
            f" {', '.join(NAMES[:-1])} or {NAMES[-1]}"
        )
    unknown = set(named.parameters) - set(fused.defaults)
    if unknown:
        raise ConfigError(
            f"optimizer.params {sorted(unknown)} cannot be used with {named.type_name} here; known"
            f" are {sorted(fused.defaults)}"
        )
    defaults = dict(named.parameters)
    groups = list(model_parameters) if model_parameters is not None else list(_trainable(model))
    if not groups:
        raise ConfigError(
            "no parameter of the model requires a gradient: unfreeze some, or leave out the"
            " optimizer"
        )
    made = ZeroOptimizer(groups, defaults, fused)
    _check_membership(model, made)
    return made


def rule_of(named: NamedFactory | None) -> UpdateRule | GenericRule:
    """Return what the optimizer of a configuration keeps of each parameter, AdamW without one."""
    if named is None:
        return UpdateRule.ADAMW
    fused = fused_by_name(named.type_name)
    if fused is not None:
        return fused.rule
    if named.type_name in WHOLE_NAMES:
        return GenericRule(0)
    trial = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    return GenericOptimizer(_torch_optimizer(named, [trial])).rule


def whole_tensors_of(
    named: NamedFactory | None, shapes: Sequence[ParameterShape], world_size: int
) -> tuple[WholeTensors, tuple[frozenset[str], ...]]:
    """Return what the optimizer of a configuration needs of a model's parameters, and its groups.

    The groups are the names of their parameters; an optimizer of slices has one, which is not told.

    Raises:
        ConfigError: if it cannot run on one of them.
    """
    if named is None or named.type_name not in WHOLE_NAMES:
        return WholeTensors(), ()
    made = {
        each.name: torch.nn.Parameter(torch.empty(each.shape, dtype=torch.float32, device="meta"))
        for each in shapes
        if each.is_trainable
    }
    for each in shapes:
        if each.use_muon is not None and each.name in made:
            made[each.name].use_muon = each.use_muon  # type: ignore[attr-defined]
    names = {id(each): name for name, each in made.items()}
    optimizer = _object_of(named, list(made.values()), names)
    members = [
        ManagedParameter(name, each, order, ElementType.FP32, 0)
        for order, (name, each) in enumerate(made.items())
    ]
    groups = optimizer.param_groups
    by_group = [frozenset(names[id(each)] for each in group["params"]) for group in groups]
    return WholeOptimizer(optimizer).assign(members, groups, world_size), tuple(by_group)


def _object_of(
    named: NamedFactory, groups: list[Any], names: Mapping[int, str]
) -> torch.optim.Optimizer:
    for key, value in named.parameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"optimizer.params.{key}: must be a finite number, got {value}")
    if named.type_name == "Muon":
        return make_muon(names, groups, named.parameters)
    return _torch_optimizer(named, groups)


def _torch_optimizer(named: NamedFactory, groups: list[Any]) -> torch.optim.Optimizer:
    kind = Lamb if named.type_name == "Lamb" else getattr(torch.optim, named.type_name)
    try:
        made: torch.optim.Optimizer = kind(groups, **dict(named.parameters))
    except (TypeError, ValueError, IndexError) as error:
        unknown = set(named.parameters) - (known := set(inspect.signature(kind).parameters))
        fix = f"; known are {sorted(known - {'params'})}" if unknown else ""
        raise ConfigError(f"optimizer.params of {named.type_name}: {error}{fix}") from error
    return made


def _check_membership(model: torch.nn.Module, optimizer: ZeroOptimizer) -> None:
    """Refuse parameters of the optimizer that are not in the model: nothing would train them."""
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ConfigError(
                    f"param_groups[{index}] holds a parameter (number {position}, shape"
                    f" {tuple(parameter.shape)}) that is not in the model; only parameters of the"
                    " model can be trained"
                )


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Parameters that are updated with the same scalars: one group's, that began together."""

    index: int
    """Index in `param_groups`."""
    birth: int
    """Updates of the engine before the first one of these parameters."""
    parameters: Sequence[torch.nn.Parameter]


def update_groups(
    optimizer: ZeroOptimizer | None, births: Mapping[int, int]
) -> Sequence[UpdateGroup]:
    """Return the parameter groups, split where parameters began to be trained at other steps."""
    found: list[UpdateGroup] = []
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        by_birth: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            by_birth.setdefault(births.get(id(parameter), 0), []).append(parameter)
        found.extend(UpdateGroup(index, birth, each) for birth, each in by_birth.items())
    return found


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adopt(optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
    """Take over an optimizer: the same group dictionaries, so schedulers bound to it work."""
    if isinstance(optimizer, ZeroOptimizer):
        raise ConfigError("this optimizer already belongs to an engine; pass a fresh one")
    fused = fused_of(optimizer)
    decoupled = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    if fused is not None and fused.rule is UpdateRule.ADAM and decoupled:
        raise ConfigError(
            "some groups of this Adam decay weights apart from the gradient and some do not;"
            " use one way in all, or torch.optim.AdamW"
        )
    # Adagrad makes its state before its first step.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer already has state from earlier steps; pass it before its first step"
        )
    optimizer.state.clear()
    update: FusedOptimizer | GenericOptimizer | WholeOptimizer
    if fused is not None:
        update = fused
    elif needs_whole_tensors(optimizer):
        update = WholeOptimizer(optimizer)
    else:
        update = GenericOptimizer(optimizer)
    adopted = ZeroOptimizer(
        [{**group} for group in optimizer.param_groups],
        {key: optimizer.defaults[key] for key in update.defaults if key in optimizer.defaults},
        update,
    )
    adopted.param_groups = optimizer.param_groups
    optimizer.register_step_pre_hook(_refuse_step)
    return adopted


def _refuse_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    raise RuntimeError(
        f"this {type(optimizer).__name__} was handed to zero.initialize and has no gradients any"
        " more; call engine.step(), or step() of the optimizer that zero.initialize returned"
    )
