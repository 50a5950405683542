"""What the documentation says is what the program does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# The job file behind the README's refusal; its ninth line is the one at fault.
BROKEN = """\
name: llama3-70b-sft
slurm: {partition: batch, nodes: 4, gpus_per_node: 8, time: 04:00:00}
cluster: {gpu: B200-192GB}
entrypoint: pretrain_gpt.py
model: llama3-70b
args:
  tensor-model-parallel-size: 4
  pipeline-model-parallel-size: 4
  num-virtual-stages-per-pipeline-rank: 6
  use-distributed-optimizer: true
  bf16: true
  seq-length: 4096
  micro-batch-size: 1
  global-batch-size: 32
"""


def _mtlaunch(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtlaunch.launcher", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_the_rules_page_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "rules.md").read_text() == generate.text(), "run `make docs`"


def test_the_readme_shows_the_real_refusal(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(BROKEN)
    done = _mtlaunch("check", "broken.yaml", cwd=tmp_path)
    assert done.returncode == 1
    shown = README.split("$ mtlaunch check broken.yaml\n")[1].split("```")[0].splitlines()
    said = [line for line in done.stdout.splitlines() if not line.startswith("  assumed")]
    assert [line for line in said if not line.startswith("  memory")] == shown


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\$ mtlaunch (\w+)", README, re.M))))
def test_every_command_of_the_readme_exists(command: str, tmp_path: Path) -> None:
    assert _mtlaunch(command, "--help", cwd=tmp_path).returncode == 0


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
