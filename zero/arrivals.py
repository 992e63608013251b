"""Units whose inputs need no gradient are released as soon as all of their gradients are there.

[Note: first units] No node tells when the backward of such a unit ends: it has nothing to give to
whoever came before. But every node that uses its values leads to one of its parameters then, so
when all of these have their gradients, nothing uses them any more. Where one gets none, the unit is
held until another unit's backward begins that is older, or the backward ends. So it is on several
ranks, which must do alike, but for experts: which gradients arrive is what each knows alone. Only
memory depends on this: who needs a value that is gone unshards it, see [Note: saved-tensor guard].

[Note: overtaken units] Where several units have one input, the node that produced it runs after the
backwards of all of them. But autograd runs the nodes that a thread made by descending sequence
number: when one runs that is older than a forward, all nodes of this forward have run. So the
backward of each ends when the next one begins, and one of them is unsharded at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.unit import Segment, Unit


@dataclass(slots=True, eq=False)
class Instance:
    """One forward of a unit."""

    has_gradient_inputs: bool = False
    """Whether an input needs a gradient, so that its node tells when the backward ends."""
    last_input: int = -1
    """The highest sequence number of the nodes that produced its inputs; that one tells."""
    begin: int = field(default_factory=torch._C._autograd._get_sequence_nr)
    """The least sequence number of its own nodes."""
    thread: int = field(default_factory=threading.get_ident)
    """Each has numbers of its own."""
    inputs: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    """While the forward runs on several ranks: inputs that need gradients, and their nodes."""

    def is_passed_on(self, tensor: torch.Tensor) -> bool:
        """Tell whether an output is an input as it came.

        Its node tells of what came before. So it is given one of its own on several ranks, where
        one may leave out all of a unit, and the others come to a node of that unit.
        """
        if not tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        return any(
            tensor.grad_fn is node and (node is not None or tensor is each)
            for each, node in self.inputs
        )

    def is_overtaken(self, by: Instance, sequence: int) -> bool:
        """Tell whether a node that `by` made has run ahead of the node that would tell the end."""
        is_older = self.last_input < sequence < self.begin
        return is_older and self is not by and self.thread == by.thread


class Arrivals:
    """The gradients that have arrived, of units that nothing else tells the end of."""

    def __init__(
        self,
        units: Sequence[Unit],
        release: Callable[[Unit], None],
        is_alone_with: Callable[[Unit], bool],
    ) -> None:
        """Watch units.

        Args:
            units: all of them.
            release: called for one that ends.
            is_alone_with: tells whether this rank may release a unit when it likes.
        """
        self._units = tuple(units)
        self._release = release
        self._is_alone_with = is_alone_with
        self._arrived: dict[tuple[int, int], set[tuple[int, int]]] = {}
        """Segments and positions in them, by graph task and unit."""
        self._has_any = False

    def note(self, segment: Segment, position: int) -> None:
        """Take note of the gradient of a parameter; release its unit if that was the last one."""
        self._has_any = True
        unit = self._units[segment.spec.unit_index]
        task = torch._C._current_graph_task_id()
        ending = [
            token
            for token, own in unit.backward_tokens.items()
            if own == task and isinstance(token, Instance) and not token.has_gradient_inputs
        ]
        if not ending or not unit.moves or not self._is_alone_with(unit):
            return
        arrived = self._arrived.setdefault((task, unit.index), set())
        arrived.add((segment.index, position))
        if len(arrived) < _gradient_count(unit):
            return
        for token in ending:
            del unit.backward_tokens[token]
        self._release(unit)

    def overtaken(
        self, by: Instance, sequence: int, present: Iterable[Unit]
    ) -> list[tuple[Unit, Instance]]:
        """Return whose backward is over without a sign of it, see [Note: overtaken units].

        Args:
            by: the instance whose backward begins, in the graph task that runs.
            sequence: number of the node that it begins with.
            present: the units that may hold something.
        """
        task = torch._C._current_graph_task_id()
        return [
            (unit, token)
            for unit in present
            for token, own in unit.backward_tokens.items()
            if own == task and isinstance(token, Instance) and token.is_overtaken(by, sequence)
        ]

    def take_any(self) -> bool:
        """Tell whether any gradient has arrived since this was asked before."""
        found, self._has_any = self._has_any, False
        return found

    def end_of_task(self, task: int) -> None:
        """Forget what has arrived in a graph task."""
        for key in [key for key in self._arrived if key[0] == task]:
            del self._arrived[key]

    def reset(self) -> None:
        """Forget what an interruption has left."""
        self._arrived.clear()
        self._has_any = False


def _gradient_count(unit: Unit) -> int:
    """Return how many parameters of a unit get a gradient if they are used."""
    return sum(
        parameter.requires_grad for segment in unit.segments for parameter in segment.parameters
    )
