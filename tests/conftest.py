"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test directory on sys.path.
sys.path.insert(0, str(Path(__file__).parent))

from slurm_cluster import SlurmCluster, why_unavailable  # noqa: E402


def _slurm_required() -> bool:
    ci = os.environ.get("CI", "").lower() in {"1", "true"}
    return ci or os.environ.get("MTLAUNCH_REQUIRE_SLURM") == "1"


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A started cluster of two nodes with accounting; skips where there can be none.

    With CI=true or MTLAUNCH_REQUIRE_SLURM=1 it fails instead, so that no pipeline passes because
    its packages are missing.  Call `slurm.clear()` after a test that leaves jobs behind.
    """
    reason = why_unavailable()
    if reason is not None:
        if _slurm_required():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster
