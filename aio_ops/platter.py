"""What a simulated machine has on its disk after a crash: files and directories, hostile to both.

[Note: what a crash keeps] A write that was not synced is kept, lost, or torn: some of its sectors
are new and the others old, in any mixture. A new, renamed or removed name that was not synced is
kept or lost, each on its own. Everything that was synced is there. The machine stops at the event
that it is told to stop at: any submission, completion, sync or change of a name.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from aio_ops.run_directory import RunClaim, RunInUseError
from aio_ops.simulated import SimulatedFile

_SECTOR_BYTES = 512


class SimulatedCrash(BaseException):
    """The simulated machine stopped; nothing that runs on it goes on."""


class PlatterFile(SimulatedFile):
    """A simulated file whose bytes are only safe once they are synced."""

    def __init__(self, platter: "Platter", path: Path, size_bytes: int) -> None:
        super().__init__(path, size_bytes)
        self._platter = platter
        self._is_dead = False
        self._written: list[tuple[int, bytes]] = []
        self._synced = bytearray(size_bytes)

    def store(self, start: int, data: bytes) -> None:
        """Take bytes that are not safe yet; a machine that has crashed does nothing more."""
        if self._is_dead:
            return
        self._platter.tick()
        super().store(start, data)
        self._written.append((start, data))

    def sync(self) -> None:
        """Make safe what was written, all of it or, if the machine stops here, none for sure."""
        self._platter.tick()
        self._synced[:] = self.contents
        self._written.clear()

    def reopen(self) -> "PlatterFile":
        """Return the file, open again."""
        self._closed = False
        return self

    def after_crash(self, chance: random.Random) -> "PlatterFile":
        """Return the file that the disk has after a crash."""
        self._is_dead = True
        for start, data in self._written:
            match chance.choice(("kept", "lost", "torn")):
                case "kept":
                    self._synced[start : start + len(data)] = data
                case "torn":
                    for offset in range(0, len(data), _SECTOR_BYTES):
                        if chance.random() < 0.5:
                            part = data[offset : offset + _SECTOR_BYTES]
                            self._synced[start + offset : start + offset + len(part)] = part
                case _:
                    pass
        found = PlatterFile(self._platter, self.path, self.size_bytes)
        found.contents[:] = found._synced[:] = self._synced
        return found


@dataclass(eq=False)
class _Inode:
    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class SimulatedDirectory:
    """A directory whose names and bytes are only safe once they are synced."""

    platter: "Platter"
    path: Path
    _entries: dict[str, _Inode] = field(default_factory=dict)
    _safe: dict[str, _Inode] = field(default_factory=dict)
    _changes: list[tuple[str, _Inode | None]] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the names in it, sorted."""
        return sorted(self._entries)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, or None if there is none."""
        inode = self._entries.get(name)
        return None if inode is None else inode.data

    def write(self, name: str, data: bytes) -> None:
        """Make or overwrite a file."""
        self.platter.tick()
        if name not in self._entries:
            self._change(name, _Inode())
        self._entries[name].data = data

    def sync(self, name: str) -> None:
        """Make the bytes of a file safe."""
        self.platter.tick()
        inode = self._entries[name]
        inode.synced = inode.data

    def rename(self, name: str, target: str) -> None:
        """Let a file take the place of another at once."""
        self.platter.tick()
        inode = self._entries[name]
        self._change(target, inode)
        self._change(name, None)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self.platter.tick()
        if name in self._entries:
            self._change(name, None)

    def sync_entries(self) -> None:
        """Make the names safe."""
        self.platter.tick()
        self._safe = dict(self._entries)
        self._changes.clear()

    def lose(self, chance: random.Random) -> None:
        """Become what the disk has after a crash."""
        for name, inode in self._changes:
            if chance.random() < 0.5:
                _put(self._safe, name, inode)
        self._changes.clear()
        for inode in self._safe.values():
            if inode.data != inode.synced:
                kept = chance.choice((0, len(inode.data), chance.randrange(len(inode.data) + 1)))
                inode.synced = inode.data[:kept] if chance.random() < 0.7 else inode.synced
            inode.data = inode.synced
        self._entries = dict(self._safe)

    def _change(self, name: str, inode: _Inode | None) -> None:
        _put(self._entries, name, inode)
        self._changes.append((name, inode))


def _put(entries: dict[str, _Inode], name: str, inode: _Inode | None) -> None:
    if inode is None:
        entries.pop(name, None)
    else:
        entries[name] = inode


class SimulatedClaim(RunClaim):
    """A directory of a simulated machine that one run has for itself."""

    def __init__(self, platter: "Platter", path: Path) -> None:
        self.path = path
        self.is_new = path not in platter.known
        platter.known.add(path)
        if path in platter.claimed:
            raise RunInUseError(f"{path} is in use by a living run")
        platter.claimed.add(path)
        self._platter = platter
        self.entries = platter.directory(path)

    def release(self) -> None:
        """Let another run have the directory."""
        self._platter.claimed.discard(self.path)

    def remove(self) -> None:
        """Forget the directory."""
        self._platter.known.discard(self.path)
        self.release()


class Platter:
    """All disks of one simulated machine; it stops before event `stop_at` [Note: what a crash
    keeps]."""

    def __init__(self) -> None:
        self.events = 0
        self.stop_at: int | None = None
        self.known: set[Path] = set()
        """Directories of runs."""
        self.claimed: set[Path] = set()
        """Those that a run has at the moment."""
        self._files: dict[Path, PlatterFile] = {}
        self._directories: dict[Path, SimulatedDirectory] = {}

    def tick(self) -> None:
        """Count an event.

        Raises:
            SimulatedCrash: if the machine stops here.
        """
        if self.stop_at is not None and self.events >= self.stop_at:
            raise SimulatedCrash
        self.events += 1

    def directory(self, path: Path) -> SimulatedDirectory:
        """Return the directory at a path; it is there at once."""
        return self._directories.setdefault(path, SimulatedDirectory(self, path))

    def claim(self, path: Path) -> SimulatedClaim:
        """Let a run have a directory for itself."""
        return SimulatedClaim(self, path)

    def open_file(self, path: Path, size_bytes: int, *, create: bool) -> PlatterFile:
        """Return a named file, new or as it was left."""
        found = self._files.get(path)
        if create:
            if self.directory(path.parent).read(path.name) is not None:
                raise FileExistsError(f"{path} is there already")
            found = self._files[path] = PlatterFile(self, path, size_bytes)
            self.directory(path.parent).write(path.name, b"")
        if found is None or self.directory(path.parent).read(path.name) is None:
            raise FileNotFoundError(f"{path} is not there")
        if found.size_bytes != size_bytes:
            raise OSError(f"{path} has {found.size_bytes} bytes, not {size_bytes}")
        return found.reopen()

    def crash(self, seed: int) -> None:
        """Stop the machine and start it again with what a crash keeps."""
        chance = random.Random(seed)
        self._files = {path: file.after_crash(chance) for path, file in self._files.items()}
        for directory in self._directories.values():
            directory.lose(chance)
        for path in list(self._files):
            if self.directory(path.parent).read(path.name) is None:
                del self._files[path]
        self.events = 0
        self.stop_at = None
        self.claimed.clear()
