"""Whether a lock of the kernel (`flock`) holds on all nodes that mount a file system, or on its own node only."""

from pathlib import Path

import psutil

_OF_ONE_NODE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay")
_OF_ALL_NODES = ("gpfs", "ceph")
_NFS = ("nfs", "nfs4")
_ONLY_HERE = {"nolock", "local_lock=flock", "local_lock=all"}


def locks_reach_all_nodes(path: Path) -> bool:
    """Whether every process that can open `path` sees its locks; False if the kind of file system does not tell."""
    place = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    if not mounts:
        return False
    # the longest path is nearest; of several mounts at one path the last one is seen
    _, mount = max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]))
    options = set(mount.opts.split(","))
    if mount.fstype in _NFS:
        return not options & _ONLY_HERE
    if mount.fstype == "lustre":
        return "flock" in options
    return mount.fstype in (*_OF_ONE_NODE, *_OF_ALL_NODES)
