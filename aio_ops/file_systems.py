"""What kinds of file systems there are, and which one a path lies on."""

import re
from pathlib import Path

NETWORK = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.mountpoint-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "panfs",
        "prl_fs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    }
)
MEMORY = frozenset({"ramfs", "tmpfs"})
STACKED = frozenset({"aufs", "fuse.fuse-overlayfs", "overlay"})


def find_mount(mountinfo: str, where: str) -> tuple[str, str]:
    """Return type and device of the mount that holds an absolute path, by the kernel's table."""
    best, found = -1, ("unknown", "unknown")
    for line in mountinfo.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, details = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 5 or len(details) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of equal ones the later mount covers the earlier
            best, found = len(point), (details[0], details[1])
    return found


def mount_of(directory: Path) -> tuple[str, str]:
    """Return type and device of the file system that a directory lies on."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        where = str(directory.resolve())
    except OSError:
        return "unknown", "unknown"
    return find_mount(text, where)
