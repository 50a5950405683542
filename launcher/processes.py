"""Process trees by /proc and prctl, for the local executor."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec it would be too late


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name, so that index 0 is the state (proc(5) field 3)."""
    try:
        # the name may be bytes of any kind, or end in the middle of a character
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: a pid that is used again differs."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def alive(pid: int, ticks: int | None) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z" and (ticks is None or int(fields[19]) == ticks)


def descendants(pid: int) -> list[int]:
    """Children, their children and so on; in parents-first order."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def adopt_orphans() -> None:
    """Have processes whose parents are gone come to this one instead of to init."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process, and what it becomes by exec, killed when its parent is."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
