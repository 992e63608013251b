"""Making a striped file: all of its space is reserved before any of it is used."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aio_ops.engine import Engine
from aio_ops.keeping import FileKeeper
from aio_ops.stripe_measurement import measure_weights, shared_alignment
from aio_ops.striped_file import StripedFile, check_directories
from aio_ops.striping import DEFAULT_UNIT_BYTES, StripeLayout, check_weights, plan_stripes
from aio_ops.transfer import TransferFile


@dataclass(frozen=True, slots=True)
class StripeRequest:
    """What `Engine.create_striped_file` was asked for."""

    directories: Sequence[Path]
    size_bytes: int
    weights: Sequence[float] | Literal["auto"]
    capacities: Sequence[int | None] | None
    unit_bytes: int | None
    any_alignment: bool
    name: str | None = None
    """The members' name in their directories; without one they vanish with their descriptors."""


def create(engine: Engine, request: StripeRequest) -> StripedFile:
    """Return a new striped file; see `Engine.create_striped_file`."""
    directories = [Path(directory) for directory in request.directories]
    check_directories(directories)
    capacities = list(request.capacities or [None] * len(directories))
    _check_counts(request, directories, capacities)
    alignment_bytes = shared_alignment(engine, directories)
    unit_bytes = request.unit_bytes or _unit_for(engine, len(directories), alignment_bytes)
    # Once without measuring: what cannot be laid out is found before anything is written.
    given = [1.0] * len(directories) if request.weights == "auto" else list(request.weights)
    _plan(request.size_bytes, given, capacities, unit_bytes, alignment_bytes)
    if request.weights == "auto" and len(directories) > 1:
        most_bytes = [min(request.size_bytes, limit or request.size_bytes) for limit in capacities]
        given = measure_weights(engine, directories, most_bytes=most_bytes)
    layout, used = _plan(request.size_bytes, given, capacities, unit_bytes, alignment_bytes)
    members = _reserve(engine, [directories[index] for index in used], layout, request)
    return StripedFile(members, layout)


def _check_counts(
    request: StripeRequest, directories: Sequence[Path], capacities: Sequence[int | None]
) -> None:
    if isinstance(request.weights, str):
        if request.weights != "auto":
            raise ValueError(f"weights are numbers or 'auto', got {request.weights!r}")
    elif len(request.weights) != len(directories):
        raise ValueError(
            f"{len(request.weights)} weights were given for {len(directories)} directories"
        )
    else:
        check_weights(request.weights)
    if len(capacities) != len(directories):
        raise ValueError(
            f"{len(capacities)} capacities were given for {len(directories)} directories"
        )


def _unit_for(engine: Engine, member_count: int, alignment_bytes: int) -> int:
    """Return a unit small enough that what the engine moves at once lies on every member."""
    unit_bytes = min(DEFAULT_UNIT_BYTES, engine.bytes_at_once // (2 * member_count))
    return max(unit_bytes // alignment_bytes, 1) * alignment_bytes


def _plan(
    size_bytes: int,
    weights: Sequence[float],
    capacities: Sequence[int | None],
    unit_bytes: int,
    alignment_bytes: int,
) -> tuple[StripeLayout, list[int]]:
    """Return a layout, and which directories have a member: one without bytes has no file."""
    used = list(range(len(weights)))
    while True:
        layout = plan_stripes(
            size_bytes,
            [weights[index] for index in used],
            alignment_bytes=alignment_bytes,
            unit_bytes=unit_bytes,
            capacities=[capacities[index] for index in used],
        )
        if all(layout.member_bytes):
            return layout, used
        used = [index for index, own in zip(used, layout.member_bytes, strict=True) if own]


def _reserve(
    engine: Engine, directories: Sequence[Path], layout: StripeLayout, request: StripeRequest
) -> list[TransferFile]:
    """Make every member, or none and say which it is that cannot be."""
    members: list[TransferFile] = []
    try:
        for directory, size_bytes in zip(directories, layout.member_bytes, strict=True):
            members.append(_make(engine, directory, size_bytes, request))
    except OSError as error:
        _give_up(members, request)
        place, size_bytes = directories[len(members)], layout.member_bytes[len(members)]
        raise OSError(
            error.errno,
            f"{place} cannot hold its share of {size_bytes} of the {layout.size_bytes} bytes that "
            f"are striped over {len(directories)} directories: {error.strerror}; or give it a "
            "capacity, then the others hold the rest",
        ) from error
    except BaseException:
        _give_up(members, request)
        raise
    return members


def _make(engine: Engine, directory: Path, size_bytes: int, request: StripeRequest) -> TransferFile:
    if request.name is not None:
        return engine.open_named_file(directory / request.name, size_bytes, create=True)
    return engine.create_file(directory, size_bytes, any_alignment=request.any_alignment)


def _give_up(members: Sequence[TransferFile], request: StripeRequest) -> None:
    for member in members:
        member.close()
        if request.name is not None:
            member.path.unlink()


def open_named(
    engine: FileKeeper, paths: Sequence[Path], member_bytes: Sequence[int], unit_bytes: int
) -> StripedFile:
    """Return a striped file whose members were made with names, laid out as it was.

    Raises:
        OSError: if a member is missing or has another size.
    """
    members: list[TransferFile] = []
    try:
        for path, size_bytes in zip(paths, member_bytes, strict=True):
            members.append(engine.open_named_file(path, size_bytes, create=False))
        # Weights that are whole numbers of sectors give each member exactly its bytes again.
        layout = plan_stripes(
            sum(member_bytes),
            [float(size_bytes) for size_bytes in member_bytes],
            alignment_bytes=max(member.alignment_bytes for member in members),
            unit_bytes=unit_bytes,
        )
    except BaseException:
        for member in members:
            member.close()
        raise
    if layout.member_bytes != tuple(member_bytes):
        raise ValueError(f"a striped file of {list(member_bytes)} bytes cannot be laid out again")
    return StripedFile(members, layout)
