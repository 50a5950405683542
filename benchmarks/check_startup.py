"""CPU time of `mtlaunch check`, beside bare Python and `import torch`.

    python benchmarks/check_startup.py [--runs N]

user + system time of whole processes, the least of N runs: what the command costs a shared login
node, whatever else runs there. Expected of `check` on a job file: at most 0.4 s on two shared
cores, 0.25 s as the goal.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPECTED_S, GOAL_S = 0.4, 0.25

CHECK = "from mtlaunch.launcher.cli import main; main()"


def cpu_s(words: list[str], runs: int) -> float | None:
    """The least CPU time of a command, in seconds; None when it fails."""
    least = float("inf")
    # as on a login node, where modules are compiled once and not by every command
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "mtlaunch-pycache"))
    for _ in range(runs + 1):  # the first one may compile modules
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, env=environ, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            return None
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        least = min(least, used)
    return least


def machine() -> str:
    model = "unknown CPU"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    load = os.getloadavg()[0]
    packages = ", ".join(f"{name} {_version(name)}" for name in ("click", "msgspec", "torch"))
    return (
        f"{model}, {os.cpu_count()} cores, load {load:.1f}, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, {packages}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    python = sys.executable
    commands = {
        "python -c pass": [python, "-c", "pass"],
        "python -c 'import torch'": [python, "-c", "import torch"],
        "mtlaunch check examples/tiny-lora/job.yaml": [
            *(python, "-c", CHECK, "check"),
            str(ROOT / "examples" / "tiny-lora" / "job.yaml"),
        ],
        "mtlaunch check templates/job.yaml": [
            *(python, "-c", CHECK, "check"),
            str(ROOT / "templates" / "job.yaml"),
        ],
    }
    print(machine())
    print(f"CPU time, user + system, least of {runs}:")
    # torch takes seconds: fewer runs of it
    seconds = {
        name: cpu_s(words, min(runs, 3) if "torch" in name else runs)
        for name, words in commands.items()
    }
    bare, torch = seconds["python -c pass"], seconds["python -c 'import torch'"]
    code = 0
    for name, took in seconds.items():
        if took is None:
            print(f"  {'failed':>8}  {name}")
            code = code if "torch" in name else 1
            continue
        shares = [f"{took / bare:.1f} x python"] if bare else []
        shares += [f"{took / torch:.2f} x import torch"] if torch else []
        verdict = ""
        if name.startswith("mtlaunch"):
            verdict = "goal met" if took <= GOAL_S else "as expected"
            if took > EXPECTED_S:
                verdict = f"more than {EXPECTED_S} s"
        print(f"  {took:6.3f} s  {name:<44} {', '.join(shares)}  {verdict}".rstrip())
    return code


if __name__ == "__main__":
    sys.exit(main())
