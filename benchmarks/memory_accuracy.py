"""How far the estimator is from measured runs.

    python benchmarks/memory_accuracy.py [cases.jsonl] [--worst 15] [--kind dense]

Each line of the file is a measured run: `args` (Megatron-LM's options with underscores),
`gpu`, `world_size`, `cluster` (software versions), `env_vars`, `kinds`, and `measured` with
`alloc_bytes` (between steps) and `max_alloc_bytes` (peak), both of the last pipeline rank. Prints
mean and median error of both, the worst runs, the share of peaks under-estimated by more than
10%, and how many measured peaks lie within the estimate's bounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtlaunch.preflight.gpus import GPUS
from mtlaunch.preflight.jobfile import from_mapping
from mtlaunch.preflight.memory import Estimate, RankEstimate, estimate
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.resolve import resolve

DEFAULT_CASES = Path(__file__).resolve().parents[2] / "shared" / "memory_truth" / "cases.jsonl"
GPU_NAMES = {"A100": "A100-80GB", "H100": "H100-80GB", "GB200": "GB200-192GB"}
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measured run beside its estimate."""

    case: str
    kinds: tuple[str, ...]
    pp: int
    estimate: Estimate
    steady: int
    peak: int

    @property
    def rank(self) -> RankEstimate:
        return self.estimate.ranks[-1]

    @property
    def steady_error(self) -> float:
        return self.rank.steady_bytes / self.steady - 1

    @property
    def peak_error(self) -> float:
        return self.rank.peak_bytes / self.peak - 1

    @property
    def covered(self) -> bool:
        return self.rank.peak_low_bytes <= self.peak <= self.rank.peak_high_bytes


def plan_of(record: dict[str, Any]) -> Plan:
    """The Plan of a record, through a job file like any other."""
    args = dict(record["args"])
    nodes, per_node = record["world_size"], 1
    per_gpu = GPUS[GPU_NAMES[record["gpu"]]].gpus_per_node
    if nodes % per_gpu == 0:
        nodes, per_node = nodes // per_gpu, per_gpu
    versions = {
        key: value
        for key, value in record.get("cluster", {}).items()
        if key in ("torch", "transformer_engine", "megatron_core")
    }
    # records without one ran on NGC 24.10, which ships Transformer Engine 1.11
    versions.setdefault("transformer_engine", "1.11")
    job = {
        "entrypoint": "pretrain_gpt.py",
        "slurm": {"nodes": nodes, "gpus_per_node": per_node},
        "cluster": {"gpu": GPU_NAMES[record["gpu"]], **versions},
        "env": {name: str(value) for name, value in record.get("env_vars", {}).items()},
        "args": args,
    }
    return resolve(from_mapping(job, record["id"]))


def row_of(record: dict[str, Any]) -> Row | None:
    plan = plan_of(record)
    result = estimate(plan)
    if result is None:
        return None
    measured = record["measured"]
    return Row(
        record["id"],
        tuple(record["kinds"]),
        plan.pp,
        result,
        int(measured["alloc_bytes"]),
        int(measured["max_alloc_bytes"]),
    )


def summary(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    steady = [abs(row.steady_error) for row in rows]
    peak = [abs(row.peak_error) for row in rows]
    worst = max((row.peak_error for row in rows), key=abs)
    under = sum(row.peak_error < -0.10 for row in rows)
    covered = sum(row.covered for row in rows) / len(rows)
    return (
        f"{len(rows):4d} | {statistics.mean(steady):6.2%} | {statistics.median(steady):6.2%} | "
        f"{statistics.mean(peak):6.2%} | {statistics.median(peak):6.2%} | {worst:+7.1%} | "
        f"{under:3d} | {covered:6.1%}"
    )


def table(rows: Sequence[Row]) -> None:
    subsets: list[tuple[str, Callable[[Row], bool]]] = [
        ("all", lambda row: True),
        ("dense", lambda row: "dense" in row.kinds),
        ("moe", lambda row: "moe" in row.kinds),
        ("PP=1", lambda row: row.pp == 1),
        ("PP>1", lambda row: row.pp > 1),
        (">= 5 GiB", lambda row: row.peak >= 5 * GIB),
        (">= 20 GiB", lambda row: row.peak >= 20 * GIB),
    ]
    print(
        "subset     |   n  | steady | median |  peak  | median |  worst  | "
        "under by >10% | peak within bounds"
    )
    for name, wanted in subsets:
        print(f"{name:10s} | {summary([row for row in rows if wanted(row)])}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="?", type=Path, default=DEFAULT_CASES)
    parser.add_argument("--worst", type=int, default=15, help="runs to print, the worst first")
    parser.add_argument("--kind", help="only runs with this tag, e.g. dense, moe, distopt")
    parser.add_argument("--all", action="store_true", help="also runs with unmodelled features")
    options = parser.parse_args(argv)
    if not options.cases.exists():
        print(f"no measured runs at {options.cases}: nothing to compare with")
        return 0
    records = [json.loads(line) for line in options.cases.read_text().splitlines() if line.strip()]
    if options.kind:
        records = [record for record in records if options.kind in record["kinds"]]
    start = time.perf_counter()
    rows = [row for row in map(row_of, records) if row is not None]
    elapsed = time.perf_counter() - start
    modelled = [row for row in rows if not row.estimate.not_modelled]
    outside = [row for row in rows if row.estimate.not_modelled]
    print(
        f"{len(records)} runs: {len(modelled)} modelled, {len(outside)} with features outside the "
        f"model, {len(records) - len(rows)} without a known shape "
        f"({1000 * elapsed / max(1, len(records)):.1f} ms a run, reading included)\n"
    )
    table(modelled)
    shown = rows if options.all else modelled
    print("\nworst, steady and peak in MiB:")
    for row in sorted(shown, key=lambda row: -max(abs(row.steady_error), abs(row.peak_error)))[
        : options.worst
    ]:
        mib = 2**20
        print(
            f"{row.steady_error:+7.2%} {row.steady / mib:8.0f}  {row.peak_error:+7.2%} "
            f"{row.peak / mib:8.0f}  {row.case}  {','.join(row.kinds)}"
            + (f"  [{'; '.join(row.estimate.not_modelled)}]" if row.estimate.not_modelled else "")
        )
    if outside:
        print("\nwith features outside the model:")
        table(outside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
