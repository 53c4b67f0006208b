"""What a process has done last, in a page of memory that other processes of its node can read.

A process that hangs answers no call, and a thread of it may live on while its work does not. So the work itself leaves
marks: `begin` at the start of a call, `mark` with each unit of it (a micro batch, a tensor, a bucket). A mark writes
some bytes into anonymous memory (`memfd_create`), which takes microseconds. `look` reads them from another process of
the same user, also while the marked process is frozen or holds the interpreter's lock. The memory ends with that
process.

Without `open_page`, marks do nothing, as in tests that call the marked code in their own process.

Pure: no ray, no torch.
"""

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

Kind = Literal["work", "files", "handover"]
"""Why a process may be silent for long. `work`: it may not. `files`: a library reads or writes files in one call.
`handover`: it may wait for a process of another role, which has deadlines of its own."""

_KINDS: tuple[Kind, ...] = ("work", "files", "handover")
_HEAD = struct.Struct("<QQQBH")
"""Marks since the start, calls, marks since the call began, kind, length of the text."""
_SIZE = 512
_MAX_TEXT = _SIZE - _HEAD.size


class _Page:
    """The page of this process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("mrl-progress")
        os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        self._num_marks = self._num_calls = self._in_call = 0
        self._call = "start"
        self._write(self._call, "work")

    def begin(self, call: str, kind: Kind) -> None:
        self._call, self._in_call = call, 0
        self._num_calls += 1
        self._write(call, kind)

    def mark(self, what: str, kind: Kind) -> None:
        self._in_call += 1
        self._write(f"{self._call}: {what}", kind)

    def _write(self, text: str, kind: Kind) -> None:
        self._num_marks += 1
        content = text.encode(errors="replace")[:_MAX_TEXT]
        self._memory[_HEAD.size : _HEAD.size + len(content)] = content
        head = self._num_marks, self._num_calls, self._in_call, _KINDS.index(kind), len(content)
        _HEAD.pack_into(self._memory, 0, *head)


_page: _Page | None = None


def open_page() -> None:
    """From now on this process leaves marks."""
    global _page
    if _page is None:
        _page = _Page()


def page_descriptor() -> int:
    """Descriptor of this process's page; -1 before `open_page`."""
    return -1 if _page is None else _page.descriptor


def begin(call: str, *, kind: Kind = "work") -> None:
    """Mark the begin of a call."""
    if _page is not None:
        _page.begin(call, kind)


def mark(what: str, *, kind: Kind = "work") -> None:
    """Mark a unit of the call's work that begins now."""
    if _page is not None:
        _page.mark(what, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A process as another process of its node sees it."""

    num_marks: int
    """Since the process started."""
    num_calls: int
    """Calls that it has begun."""
    in_call: int
    """Marks since the newest of them began."""
    text: str
    """The newest mark."""
    kind: Kind
    num_bytes: int
    """Bytes that it and its children have read and written; 0 unless the kind is `files`."""
    state: str
    """`running`, `sleeping`, `stopped`, ... (psutil)."""
    waits_for_disk: bool
    """A thread of it or of a child waits for a disk, which nothing interrupts; False unless the kind is `files`."""


def look(pid: int, descriptor: int, *, proc: str = "/proc") -> Seen | None:
    """A process of this user on this node, by its page's descriptor; None if it has ended or has no page.

    `proc` is where its page and the states of its threads are found.
    """
    try:
        page = os.open(f"{proc}/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.pread(page, _SIZE, 0)
    finally:
        os.close(page)
    if len(content) < _SIZE:
        return None
    num_marks, num_calls, in_call, kind, length = _HEAD.unpack_from(content)
    try:
        process = psutil.Process(pid)
        state = process.status()
        num_bytes, waits = _files(process, proc) if _KINDS[kind] == "files" else (0, False)
    except psutil.Error:
        return None
    return Seen(
        num_marks=num_marks,
        num_calls=num_calls,
        in_call=in_call,
        text=content[_HEAD.size : _HEAD.size + length].decode(errors="replace"),
        kind=_KINDS[kind],
        num_bytes=num_bytes,
        state=state,
        waits_for_disk=waits,
    )


def _files(process: psutil.Process, proc: str) -> tuple[int, bool]:
    """Bytes that a process and its children have read and written, and whether a thread of them waits for a disk."""
    num_bytes, waits = 0, False
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):  # a child has ended; its bytes are in its parent's count
            counters = each.io_counters()
            num_bytes += counters.read_chars + counters.write_chars
            waits = waits or _waits_for_disk(each.pid, proc)
    return num_bytes, waits


def _waits_for_disk(pid: int, proc: str) -> bool:
    """Whether a thread of a process does. The state of the process is that of its main thread, which waits for those
    that write files.
    """
    with suppress(OSError):  # the process has ended
        for thread in Path(proc, str(pid), "task").iterdir():
            with suppress(OSError):  # the thread has ended
                _, _, after_name = (thread / "stat").read_text(errors="replace").rpartition(")")
                if after_name.lstrip().startswith("D"):
                    return True
    return False
