"""Units at run time: unshard, reshard, and the states in between.

[Note: flat buffer] The parameters of a segment are views into one flat buffer, made by
`parameter.data = view`, which gives each its own version counter, so filling the buffer does not
look like an in-place change to autograd. Saved tensors of autograd share its storage: resizing the
storage to zero frees them too, and filling it again revives them.

[Note: hidden writes] A write through `.data` or a numpy array moves no version counter, and no hook
could see it without making every operator slower. So each parameter's values are summed up (xxh3,
at several times the speed of filling the buffer) before and after each window. On one rank the sum
of an earlier window serves as long as nobody has written the shard.

[Note: changes in place] A 16-bit parameter that rests in place has its master elsewhere, which a
write to the parameter must reach, and a write through `.data` moves no version counter. So such a
segment keeps a checksum of each parameter from when both last agreed; whatever differs when the
master is needed was written, and only that is rounded.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import nn

from estimators import ElementType, FlatLayout, Piece, SegmentSpec, shard_pieces
from offload import Device, DeviceChecksums, Field, HostDevice, Ledger, Memory, Store, has_field
from offload.arrays import torch_dtype
from offload.device import elements_at
from zero.aliases import LateAliases, checksums, device_checksums
from zero.coming import ComingParameters, gather_flat, read_flat
from zero.comm import Communicator
from zero.late import Checksums, differing
from zero.moved import returned
from zero.replicated import gather_values
from zero.seal import seal_all, sealed_like
from zero.units import ManagedParameter, Router
from zero.written import write_members


class UnitState(enum.Enum):
    """Whether the full parameters of a unit are in memory."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


_NEXT = {
    UnitState.SHARDED: {UnitState.UNSHARDING},
    UnitState.UNSHARDING: {UnitState.UNSHARDED, UnitState.SHARDED},
    UnitState.UNSHARDED: {UnitState.SHARDED},
}


class Segment:
    """Parameters of one unit in one flat buffer."""

    def __init__(
        self,
        index: int,
        spec: SegmentSpec,
        members: Sequence[ManagedParameter],
        communicator: Communicator,
    ) -> None:
        self.index = index
        self.spec = spec
        self.members = tuple(members)
        self.layout: FlatLayout = spec.layout(communicator.world_size)
        self.pieces: list[Piece] = shard_pieces(self.layout, communicator.rank)
        self.is_in_place = False
        self.is_replicated = False
        """Whether it is in place on each of several ranks, with the values of all."""
        self.flat = torch.empty(0, dtype=torch_dtype(spec.element), device="cpu")
        """Shape `[padded numel]` once attached."""
        self._device: Device = HostDevice()
        self._resident: Memory | None = None
        self.communicator = communicator
        self.dropped_gradients: set[int] = set()
        """Positions whose gradient was set to None since the segment last got gradients."""
        self._versions: list[int] = []
        self._shapes: list[torch.Size] = []
        self._views: list[torch.Tensor] = []
        self._sealed: list[torch.Tensor] = []
        self._checksums: Checksums = []
        self.audited: list[int] | None = None
        """Positions whose checksum was found to be another one, by `audit`."""
        self._device_checksums: DeviceChecksums | None = None
        self.late_differences: torch.Tensor | None = None
        """On a device, which parameters checksums showed to be written; [Note: late comparison]."""
        self.coming = ComingParameters(self)
        self.change_count = 0
        """Grows with every change of the values, on all ranks alike."""
        self._has_masters = False
        """Whether it rests in place and its masters elsewhere."""
        self._sums_hold = False
        """Whether the checksums are those of what rests in the shards now."""
        self._is_exposed = False
        self._use_count = 0
        self.aliases = LateAliases(spec, self.layout)

    @property
    def versions(self) -> list[int]:
        """Version counters of the parameters: any in-place write moves one."""
        return [parameter._version for parameter in self.parameters]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The managed parameters, in layout order."""
        return [member.parameter for member in self.members]

    def attach(self, store: Store) -> None:
        """Make the parameters views of the flat buffer: the shard itself where it is in place."""
        self.is_in_place = store.plan.is_in_place(self.index)
        self._device = store.device
        self.is_replicated = self.is_in_place and self.layout.world_size > 1
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._resident = store.resident_parameters(self.index) if self.is_in_place else None
        if self._resident is not None:
            self.flat = elements_at(self._resident, self.spec.element, self.layout.padded_numel)
            self._cut()
            _link(self.parameters, self._views)
            is_16_bit = self.spec.element is not ElementType.FP32
            self._has_masters = is_16_bit and has_field(store, self.index, Field.MASTER)
            gather_values(self, store.ledger)
            return
        self._renew()

    def detach(self) -> None:
        """Let go of the flat buffer: the parameters have their values elsewhere now."""
        self.flat, self._resident = torch.empty(0, dtype=self.flat.dtype, device="cpu"), None
        self._views.clear()
        self._sealed.clear()

    def fill(self, store: Store, ledger: Ledger) -> None:
        """Read this rank's shard into the flat buffer and gather the others'."""
        if self.is_in_place:
            return
        was_kept = self.coming.is_kept
        is_here = self.coming.take(store)
        if is_here and not was_kept:
            return
        if not is_here:
            self._device.join(read_flat(self, store))
        gather_flat(self, ledger, is_whole=is_here)

    def expose(self) -> None:
        """Make the parameters plain: their values may be read now."""
        if not self.is_in_place:
            _link(self.parameters, self._views)
            self._use_count = _use_count(self.flat)
            if not self._sums_hold or self.communicator.world_size > 1:
                self._checksums = self.checksums()
            self._sums_hold = self._is_exposed = True
        self._versions = self.versions

    def hide(self, keeps_for: Store | None = None) -> None:
        """Empty the flat buffer; whoever still views it keeps it, and the segment takes a new one.

        Autograd keeps no view of it, see [Note: saved-tensor guard], so the count is exact. With a
        store the values stay for the next use, see [Note: kept parameters].
        """
        if self.is_in_place:
            return
        storage = self.flat.untyped_storage()
        aliased = _use_count(self.flat) > self._use_count
        if aliased and self._is_exposed:
            self.aliases.add(self.flat)
        self._is_exposed = False
        if aliased or not storage.resizable() or any(map(self._has_strayed, self.members)):
            self._renew()
            return
        if keeps_for is not None:
            self.coming.keep(keeps_for)
        else:
            storage.resize_(0)
        seal_all(self.parameters, self._sealed)

    def changed(
        self, since: Sequence[int] | None = None, position: int | None = None
    ) -> list[ManagedParameter]:
        """Return the parameters written in place since they were exposed, or since `versions`.

        Only the one at `position` is looked at, if that is given.
        """
        versions = self._versions if since is None else since
        chosen = range(len(self.members)) if position is None else range(position, position + 1)
        differs = self.audited
        if differs is None or since is not None:
            differs = differing(self, self._checksums if since is None else [], chosen)
        return [
            self.members[each]
            for each in chosen
            if self.members[each].parameter._version != versions[each]
            or self._has_strayed(self.members[each])
            or each in differs
        ]

    def lost_writes(self) -> list[ManagedParameter]:
        """Return the parameters written in the window that ends.

        What a device has yet to compare, `begin_late_comparison` asks for.
        """
        if self._device.is_host or not isinstance(self._checksums, torch.Tensor):
            return self.changed()
        found = torch.ne(
            self._checksums, torch.as_tensor(self.checksums(), device=self.flat.device)
        )
        earlier = self.late_differences
        self.late_differences = found if earlier is None else earlier | found
        return [
            member
            for member, version in zip(self.members, self._versions, strict=True)
            if member.parameter._version != version or self._has_strayed(member)
        ]

    def checksums(self, positions: Sequence[int] | None = None) -> Checksums:
        """Return a checksum of the values of each parameter, or of those at some positions."""
        on_device = None if self._device.is_host else device_checksums(self)
        return checksums(self.flat, self.layout, positions, on_device)

    def collect_strays(self) -> None:
        """Copy the values of parameters that were moved off the flat buffer back into it.

        Raises:
            ValueError: if one has another shape or type now.
        """
        for member, offset, numel in zip(
            self.members, self.layout.offsets, self.layout.numels, strict=True
        ):
            if not self._has_strayed(member):
                continue
            parameter = member.parameter
            if parameter.numel() != numel or parameter.dtype is not self.flat.dtype:
                raise ValueError(
                    f"parameter {member.name} was replaced by {parameter.dtype} of shape"
                    f" {tuple(parameter.shape)}; {self.flat.dtype} with {numel} elements is needed:"
                    " convert a model before zero.initialize"
                )
            view = self.flat[offset : offset + numel].view(parameter.shape)
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view

    def take_reshaped(self) -> tuple[nn.Parameter, torch.Tensor] | None:
        """Return a parameter that rests in place and was given another shape, with its new values.

        The parameter has its old ones again.
        """
        if not self.is_in_place:
            return None
        for member, shape, offset, numel in zip(
            self.members, self._shapes, self.layout.offsets, self.layout.numels, strict=True
        ):
            if member.parameter.shape != shape:
                values = member.parameter.detach()
                member.parameter.data = self.flat[offset : offset + numel].view(shape)
                return member.parameter, values
        return None

    def accept_changes(self, position: int | None = None, sums: Checksums | None = None) -> None:
        """Take the current values as unchanged, or those of one parameter; `sums` are of all."""
        self._sums_hold = False
        self.audited = None
        if position is None:
            self._versions = self.versions
        elif self._versions:
            self._versions[position] = self.members[position].parameter._version
        if not (self._has_masters or self._is_exposed):
            return
        if position is None:
            self._checksums = self.checksums() if sums is None else sums
        else:
            self._checksums[position] = self.checksums([position])[0]  # type: ignore[assignment]

    def commit(self, store: Store, position: int | None = None) -> None:
        """Take over what a user changed in place, see [Note: changes in place].

        Args:
            store: the shards of this rank.
            position: the only parameter to look at; all of them by default.
        """
        if not self.is_in_place:
            self.aliases.require_unwritten()
            return
        if (flat := returned(self.flat, self._resident, self.spec)) is not None:
            self.flat = flat
            self._cut()
            _link(self.parameters, self._views)
        if any(map(self._has_strayed, self.members)):
            position = None
        changed = self.changed(position=position)
        if changed:
            self.collect_strays()
            if self._has_masters:
                write_members(self, store, changed)
            self.accept_changes(position)

    def forget_value(self, position: int) -> None:
        """Tell autograd that one parameter changed, and take the change as known."""
        torch.autograd.graph.increment_version([self.members[position].parameter])
        self.change_count += 1
        self.accept_changes(position)

    def forget_values(self) -> None:
        """Tell autograd that the values changed: a graph that saved the old ones must not run."""
        torch.autograd.graph.increment_version(self.parameters)
        self.change_count += 1
        self._sums_hold = False

    def _has_strayed(self, member: ManagedParameter) -> bool:
        """Tell whether a parameter was moved off the flat buffer, for example by `.data = ...`."""
        if not member.parameter.numel():
            return False
        with torch._C.DisableTorchFunctionSubclass():
            storage = member.parameter.untyped_storage()
        return bool(storage._cdata != self.flat.untyped_storage()._cdata)

    def _renew(self) -> None:
        """Give the segment a new flat buffer, empty, and make the parameters views of it."""
        with torch.inference_mode(mode=False):
            dtype = torch_dtype(self.spec.element)
            self.flat = self._device.empty(self.layout.padded_numel, dtype)
            self._cut()
            _link(self.parameters, self._views)
            self._sealed = [sealed_like(view) for view in self._views]
        self.flat.untyped_storage().resize_(0)
        seal_all(self.parameters, self._sealed)

    def _cut(self) -> None:
        """Make the views of the flat buffer that become parameters; it must be full."""
        self._views = [
            self.flat[offset : offset + numel].view(shape)
            for offset, numel, shape in zip(
                self.layout.offsets, self.layout.numels, self._shapes, strict=True
            )
        ]


class Unit:
    """Parameters that are unsharded and resharded together."""

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        segments: Sequence[Segment],
        router: Router | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.segments = tuple(segments)
        self.numel = sum(sum(segment.layout.numels) for segment in self.segments)
        """Elements of the full parameters."""
        self.router = router
        self.state = UnitState.SHARDED
        self.forward_depth = 0
        self.gather_depth = 0
        self.window_depth = 0
        """`GatheredParameters` windows of what rests in place, for which nothing is gathered."""
        self.backward_tokens: dict[object, int] = {}
        """Forward instances whose backward is running, with their graph task ids."""
        self.is_read_by_all = False
        """Whether each rank reads some of it from a drive."""

    @property
    def moves(self) -> bool:
        """Whether anything of this unit is ever freed."""
        return any(not segment.is_in_place for segment in self.segments)

    @property
    def live_bytes(self) -> int:
        """Bytes of the flat buffers that are in memory now and will be freed."""
        return sum(
            segment.flat.untyped_storage().nbytes()
            for segment in self.segments
            if not segment.is_in_place
        )

    @property
    def full_bytes(self) -> int:
        """Bytes of the flat buffers when all that is ever freed is in memory."""
        return sum(
            segment.layout.padded_numel * segment.flat.element_size()
            for segment in self.segments
            if not segment.is_in_place
        )

    @property
    def is_kept(self) -> bool:
        """Whether the full parameters are in memory for the next use."""
        return self.moves and all(
            segment.is_in_place or segment.coming.is_kept for segment in self.segments
        )

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard of the parameters."""
        return sum(
            segment.layout.shard_numel * segment.flat.element_size() for segment in self.segments
        )

    @property
    def is_unsharded(self) -> bool:
        """Whether the full parameters are in memory and count."""
        return self.state is UnitState.UNSHARDED

    @property
    def is_in_window(self) -> bool:
        """Whether a `GatheredParameters` block is around it."""
        return bool(self.gather_depth or self.window_depth)

    @property
    def is_held(self) -> bool:
        """Whether something still needs the full parameters."""
        return bool(self.forward_depth or self.gather_depth or self.backward_tokens)

    def move_to(self, state: UnitState) -> None:
        """Change state, refusing every step that the table does not allow."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"unit {self.name}: cannot go from {self.state.name} to {state.name}"
            )
        self.state = state

    def unshard(self, store: Store) -> None:
        """Bring the full parameters into memory; on failure the unit is sharded again."""
        if self.state is UnitState.UNSHARDED:
            return
        self.move_to(UnitState.UNSHARDING)
        try:
            with store.device.marking(f"unshard {self.name}"):
                for segment in self.segments:
                    segment.aliases.require_unwritten()
                    segment.fill(store, store.ledger)
        except BaseException:
            store.reclaim()
            self.drop_prefetched(store)
            for segment in self.segments:
                segment.hide()
            self.move_to(UnitState.SHARDED)
            raise
        for segment in self.segments:
            segment.expose()
        self.move_to(UnitState.UNSHARDED)

    def prefetch(self, store: Store) -> None:
        """Start to copy the parameters of a unit that is sharded to the device."""
        if self.state is UnitState.SHARDED:
            for segment in self.segments:
                segment.coming.start(store)

    def drop_prefetched(self, store: Store) -> None:
        """Free what was copied ahead and not used."""
        for segment in self.segments:
            segment.coming.drop(store)

    def reshard(self, keeps_for: Store | None = None) -> None:
        """Free the full parameters, or keep them for the next use if a store is given.

        Raises:
            RuntimeError: if a parameter was changed in place, because the change would be lost.
        """
        if self.state is not UnitState.UNSHARDED:
            return
        changed = [
            member.name
            for segment in self.segments
            if not segment.is_in_place
            for member in segment.lost_writes()
        ]
        for segment in self.segments:
            segment.hide(None if changed else keeps_for)
        self.move_to(UnitState.SHARDED)
        if keeps_for is not None and not self.is_kept:
            self.drop_prefetched(keeps_for)
        if changed:
            raise RuntimeError(
                f"parameters {', '.join(changed)} were changed in place while unit {self.name} was"
                " unsharded, and the change is lost; change them inside"
                " `with zero.GatheredParameters(parameters, modifier_rank=0):`"
            )


def _use_count(flat: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _link(parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
    for parameter, view in zip(parameters, views, strict=True):
        parameter.__class__ = nn.Parameter
        parameter.data = view
