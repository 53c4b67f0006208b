"""Refuses what another user may have planted where a run writes or reads: links, pipes, and files in shared memory.

The rule. A run follows a link inside its directory only if its own user or root made the link, and if not every user
may write to the folder of the link. The run directory itself and the folders above it may be links of anybody, because
a person has named them. In shared memory, where every user may write, a run follows no link and reads no file of
another user.

`refuse_planted_links` looks at a whole directory when a run opens it; `opener` looks again at each file that the run
writes. What a group may write, its members are trusted with.
"""

import errno
import os
import pwd
import stat
from pathlib import Path

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is refused; a pipe without an other end is no reason to wait."""


class PlantedError(PermissionError):
    """Another user made, or may have made, what lies where the run writes or reads; the message says how to go on."""


def opener(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file as `open(path, ..., opener=opener)` does, but no planted link, and nothing that is not a file.

    Raises:
        PlantedError: the path is a planted link, or a pipe, device or socket.
    """
    try:
        descriptor = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise PlantedError(f"{path} is a pipe or a socket, not a file; remove it") from error
        if error.errno != errno.ELOOP:
            raise
        refuse_planted_link(Path(path))
        descriptor = os.open(path, flags | (_FLAGS & ~os.O_NOFOLLOW), mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PlantedError(f"{path} is a pipe, a device or a folder, not a file; remove it")
    return descriptor


def refuse_planted_links(root: Path) -> None:
    """Look at all links below a directory, and in the folders that its own links lead to.

    Raises:
        PlantedError: a link is planted; names the first.
    """
    _look(root, follow=True)


def _look(folder: Path, *, follow: bool) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                refuse_planted_link(Path(entry.path))
                if follow and entry.is_dir():
                    _look(Path(entry.path), follow=False)
            elif entry.is_dir(follow_symlinks=False):
                _look(Path(entry.path), follow=follow)


def refuse_planted_link(path: Path) -> None:
    """Do nothing if `path` is no link, or one that the run may follow.

    Raises:
        PlantedError: it is planted.
    """
    status = path.lstat()
    if not stat.S_ISLNK(status.st_mode):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PlantedError(
            f"{path} is a link that {_name(status.st_uid)} made; a run follows only links of its own user and of root. "
            "Remove it, or make it yourself"
        )
    mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PlantedError(
            f"{path} is a link in a folder to which every user may write; run `chmod o-w {path.parent}` and make the "
            "link anew"
        )


def open_own(path: Path) -> int | None:
    """Descriptor of a file of this user, to read; None if it is no file, a link, or another user's.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES, errno.ENXIO):
            return None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None


def is_private_folder(path: Path) -> bool:
    """Whether `path` is a folder, no link, that this user owns and no other can write to."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, or take one that exists.

    Raises:
        PlantedError: it exists and is a link, no folder, another user's, or open to others.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_private_folder(path):
        raise PlantedError(
            f"{path} is a link, or another user made it or can write to it; remove it, or ask its owner "
            f"{_name(path.lstat().st_uid)} to"
        )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
