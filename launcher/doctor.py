"""What this machine has, for `mtlaunch doctor`. Imports neither torch nor megatron."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

from mtlaunch.launcher.slurm_env import clean_environment
from mtlaunch.launcher.version import __version__

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "megatron-bridge", "submitit")


def examine() -> dict[str, str]:
    from mtlaunch.launcher.rundir import default_runs, index_path
    from mtlaunch.launcher.slurm import unavailable_reason

    reason = unavailable_reason()
    facts = {
        "mtlaunch": __version__,
        "python": platform.python_version(),
        "slurm": "answers" if reason is None else f"no: {reason}",
        "slurm_version": _slurm_version(),
        "executor": "slurm" if reason is None else "local",
        "gpus": _gpus(),
        "runs": str(default_runs(None)),
        "index": str(index_path()),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    stripped = sorted(set(os.environ) - set(clean_environment(os.environ)))
    facts["stripped_at_submit"] = " ".join(stripped) or "nothing set"
    return facts


def _slurm_version() -> str:
    try:
        shown = subprocess.run(
            ["sbatch", "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not installed"
    return shown.stdout.strip() or "unknown"


def _gpus() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"none: {error}"
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(f"{pynvml.nvmlDeviceGetName(handle)} {memory.total / 2**30:.1f} GiB")
        driver = pynvml.nvmlSystemGetDriverVersion()
        return f"{len(found)} ({', '.join(sorted(set(found)))}), driver {driver}"
    except pynvml.NVMLError as error:
        return f"not readable: {error}"
    finally:
        pynvml.nvmlShutdown()
