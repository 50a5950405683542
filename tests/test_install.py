"""Plain `pip install .` from a clean copy, as a login node would."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_a_plain_install_has_everything_and_no_torch(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", str(clone)]
    subprocess.run(install, check=True, timeout=900)

    def mtlaunch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(python.parent / "mtlaunch"), *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert mtlaunch("--version").stdout.startswith("mtlaunch, version ")
    assert mtlaunch("init").returncode == 0
    checked = mtlaunch("check", "job.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rendered = mtlaunch("render", "job.yaml")
    assert rendered.stdout.startswith("#!/bin/bash\n"), rendered.stderr
    assert mtlaunch("explain", "ENV001").returncode == 0
    script = "print(1)"
    (tmp_path / "train.py").write_text(script)
    job = "slurm: {nodes: 1, ntasks_per_node: 1}\nentrypoint: train.py\n"
    (tmp_path / "tiny.yaml").write_text(job)
    done = mtlaunch("submit", "tiny.yaml", "--executor", "local", "--wait")
    assert done.returncode == 0, done.stderr
    imported = subprocess.run([str(python), "-c", "import torch"], capture_output=True)
    assert imported.returncode != 0, "torch must not come with the launcher"
    assert sys.version_info >= (3, 10)
