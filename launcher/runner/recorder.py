"""Keeps a rank's record up to date while the training script runs.

A daemon thread writes once a second; a last write happens at exit. It reads torch only if the
script brought it, and an error here never reaches the training.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from mtlaunch.launcher.runner.record import Slot

INTERVAL_S = 1.0

# torch.cuda.memory_stats() keys: https://docs.pytorch.org/docs/stable/generated/
# torch.cuda.memory.memory_stats.html
_ALLOCATOR = {
    "allocated_bytes": "allocated_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "allocator_retries": "num_alloc_retries",
    "allocator_ooms": "num_ooms",
}

_PACKAGES = {
    "torch": "torch",
    "megatron_core": "megatron.core",
    "transformer_engine": "transformer_engine",
}


class Recorder:
    """Samples into a slot; without one (disk full, read-only) it only keeps its state."""

    def __init__(self, slot: Slot | None, identity: dict[str, Any]) -> None:
        self._slot = slot
        self._pid = os.getpid()
        self._state: dict[str, Any] = {**identity, "phase": "starting", "samples": 0}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.sample()

    def start(self) -> None:
        atexit.register(self.finish)
        threading.Thread(target=self._run, name="mtlaunch-recorder", daemon=True).start()

    def note(self, content: dict[str, Any]) -> None:
        """Add to the record: what the injection changed, an error.

        Without a measurement: a device that is in trouble may not answer any more.
        """
        if os.getpid() == self._pid:
            self._write(content)

    def finish(self) -> None:
        if os.getpid() != self._pid:
            return  # a process that the script forked, which runs our atexit function as well
        self._stop.set()
        self.sample(phase="ended")
        if self._slot is not None:
            try:
                self._slot.flush()
            except (OSError, ValueError):
                pass

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.sample(phase="running")

    def sample(self, phase: str | None = None) -> None:
        """One measurement into the slot. Never raises: training goes on without a record."""
        content: dict[str, Any] = {} if phase is None else {"phase": phase}
        try:
            content |= host_memory()
            content |= cuda_memory()
        except Exception as error:
            content["recorder_error"] = repr(error)
        self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        """Into the state and the slot. Nothing here waits for a device: see `note`."""
        try:
            with self._lock:
                before = self._state.get("peak_device_bytes") or 0
                ended = self._state["phase"] == "ended"
                self._state.update(content)
                if "peak_device_bytes" in content:
                    self._state["peak_device_bytes"] = max(before, content["peak_device_bytes"])
                if ended:  # the sampling thread may come after the last write
                    self._state["phase"] = "ended"
                self._state["updated_s"] = time.time()
                self._state["samples"] += 1
                self._add_versions()
                if self._slot is not None:
                    self._slot.process.write(self._state)
        except Exception as error:
            self._state["recorder_error"] = repr(error)

    def _add_versions(self) -> None:
        found = self._state.setdefault("versions", {"python": sys.version.split()[0]})
        for name, module in _PACKAGES.items():
            if name not in found:
                version = getattr(sys.modules.get(module), "__version__", None)
                if version is not None:
                    found[name] = str(version)


def cuda_memory() -> dict[str, Any]:
    """Allocator statistics, memory in use and name of the rank's card; {} where there is none."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return {}
    device, stats = _busiest_device(cuda)
    if device is None:
        return {}
    found = {name: stats[key] for name, key in _ALLOCATOR.items() if key in stats}
    free_bytes, total_bytes = cuda.mem_get_info(device)
    found["peak_device_bytes"] = total_bytes - free_bytes
    found["gpu"] = {
        "name": cuda.get_device_name(device),
        "capacity_bytes": total_bytes,
        "index": device,
    }
    return found


def _busiest_device(cuda: Any) -> tuple[int | None, dict[str, Any]]:
    """The device that this process allocates on, with its allocator's statistics.

    The current device is a matter of each thread, and in the recorder's it is 0: asking without an
    index would read the wrong card and put a CUDA context of every rank on it. The statistics of
    an index need no context.
    """
    found: tuple[int | None, dict[str, Any]] = (None, {})
    most = 0
    for device in range(cuda.device_count()):
        stats = cuda.memory_stats(device)
        reserved = stats.get("reserved_bytes.all.peak") or 0
        if reserved > most:
            most, found = reserved, (device, stats)
    return found


def host_memory() -> dict[str, int]:
    """Resident memory of this process and its peak, bytes (VmRSS, VmHWM of /proc/self/status)."""
    found: dict[str, int] = {}
    names = {b"VmRSS:": "host_rss_bytes", b"VmHWM:": "host_peak_bytes"}
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                name = names.get(line[:6])
                if name:
                    found[name] = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return found


def identity(rank: int, local_rank: int, node: str, **more: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "rank": rank,
        "local_rank": local_rank,
        "node": node,
        "pid": os.getpid(),
        "started_s": now,
        **more,
    }
