"""Follows a log file that may not be there yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.5


def follow_log(path: Path, ended: Callable[[], bool], every_s: float = POLL_S) -> Iterator[str]:
    """Lines of `path` as they come, until `ended()` and nothing is left."""
    position = 0
    rest = b""
    while True:
        last = ended()
        try:
            with path.open("rb") as file:
                file.seek(position)
                chunk = file.read()
        except OSError:
            chunk = b""
        position += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
        if last:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(every_s)
