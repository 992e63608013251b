"""Striped files in small stripes, on directories that stand for drives."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from aio_ops import Engine, StripedFile
from tests.aio_ops.support import SECTOR

UNIT = 2 * SECTOR
SIZE = 37 * SECTOR
WEIGHTS = (3.0, 1.0, 2.0)


def places(parent: Path, count: int = 3) -> list[Path]:
    directories = [parent / f"drive{index}" for index in range(count)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return directories


def striped(
    engine: Engine,
    directories: Sequence[Path],
    size_bytes: int = SIZE,
    weights: Sequence[float] = WEIGHTS,
    *,
    any_alignment: bool = False,
) -> StripedFile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # tests have one drive for all
        return engine.create_striped_file(
            directories, size_bytes, weights=weights, unit_bytes=UNIT, any_alignment=any_alignment
        )
