"""Save while training goes on: the state at the call, copied before it changes.

[Note: copy before change] What changes at any moment is copied before the call returns: gradients
of a half accumulated window, and parameters that rest in place, where users write without our
knowledge. The rest changes by the sub-group, and says so before: `Store.before_change`. A thread
copies the sub-groups in the order in which an update visits them, reading extents beside the pager;
whoever is about to change one that is not copied yet waits for it. Where the file system can share
bytes between files, the swap file is cloned at the call, and nobody waits for what rests in it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from estimators import SubGroup
from offload import Field, Store
from offload.groups import ExtentReader
from zero.checkpoint.save import Save
from zero.runtime import Runtime

CopyPlan = Sequence[tuple[SubGroup, Collection[Field]]]


class BackgroundSave:
    """A save that a thread finishes."""

    def __init__(self, store: Store, save: Save, plan: CopyPlan) -> None:
        self.tag = save.request.tag
        self._store = store
        self._save = save
        self._reader = ExtentReader(store, save.io, plan)
        self._waiting = self._reader.guarded
        self._copied = threading.Condition()
        self._error: BaseException | None = None
        self.path: Path | None = None
        self.waited_groups = 0
        """Sub-groups that somebody had to wait for."""
        store.before_change = self._before_change
        self._thread = threading.Thread(target=self._run, name=f"save {self.tag}")
        self._thread.start()

    @property
    def is_cloned(self) -> bool:
        """Whether what rests on NVMe is read from a clone of the swap file."""
        return self._reader.is_cloned

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is in its place, or has failed."""
        return not self._thread.is_alive()

    def warn_if_failed(self) -> None:
        """Tell of a failure that nobody has waited for yet."""
        if self._error is not None:
            warnings.warn(
                f"saving {self.tag} failed: {self._error}; training goes on, and"
                " engine.wait_for_checkpoint() raises this",
                RuntimeWarning,
                stacklevel=4,
            )

    def wait(self) -> Path:
        """Wait until the checkpoint is in its place and return its folder.

        Raises:
            OSError: if a write failed.
            CheckpointError: if another rank failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self.path is None:
            raise RuntimeError(f"the save of {self.tag} ended without a result")
        return self.path

    def _before_change(self, group: SubGroup) -> None:
        if group.index not in self._waiting:
            return
        with self._copied:
            self.waited_groups += 1
            self._copied.wait_for(lambda: group.index not in self._waiting)

    def _run(self) -> None:
        try:
            self._copy()
            self.path = self._save.finish()
        except BaseException as error:  # noqa: BLE001  raised by whoever waits
            self._error = error

    def _copy(self) -> None:
        try:
            for group, fields, reader in self._reader.read():
                self._save.file.write_group(group, reader.copy, fields)
                self._release({group.index})
        except BaseException as error:
            self._save.fail(error)
            self._save.close()
            raise
        finally:
            self._release(set(self._waiting))
            self._reader.close()

    def _release(self, copied: set[int]) -> None:
        with self._copied:
            self._waiting -= copied
            self._copied.notify_all()


def changing_fields(runtime: Runtime, group: SubGroup, *, blocking: bool) -> frozenset[Field]:
    """Return the fields to copy at once: all, or those that may change without a word.

    What rests on a GPU is read by its owner alone.
    """
    store, segment = runtime.store, runtime.segments[group.segment]
    if blocking or not store.device.is_host:
        return frozenset(Field)
    if segment.is_in_place:
        return frozenset({Field.GRADIENT, Field.PARAMETER, Field.MASTER})
    return frozenset({Field.GRADIENT})
