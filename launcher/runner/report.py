"""Merges the records of a run into `report.json` (schema mtlaunch.report/1).

Used by the epilog on the first node of the job and again by `mtlaunch report`, so that a report
never depends on one hook having run. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtlaunch.launcher.runner.record import RankRecord, read_file

SCHEMA = "mtlaunch.report/1"

# States that a job gets without a fault of a rank; squeue(1), JOB STATE CODES.
_ENDED_FROM_OUTSIDE = {"CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "TIMEOUT"}

# Report keys of a rank: contract, DESIGN section 4.
_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None when it is missing or torn."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write by atomic rename: a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def attempts_of(run_dir: Path) -> list[int]:
    """Attempts that left records, in order; more than one after a requeue."""
    try:
        names = os.listdir(run_dir / "records")
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def read_records(run_dir: Path, attempt: int) -> tuple[list[RankRecord], list[str]]:
    """All records of an attempt, and what could not be read."""
    records: list[RankRecord] = []
    lost: list[str] = []
    for path in sorted((run_dir / "records" / str(attempt)).glob("*.rec")):
        try:
            records += read_file(path)
        except (OSError, ValueError) as error:
            lost.append(f"{path.name}: {error}")
    return records, lost


def build(run_dir: Path, job: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report of a run from what lies in its folder; `job` is the scheduler's word on it."""
    launch = read_json(run_dir / "payload" / "launch.json") or {}
    status = read_json(run_dir / "status.json") or {}
    attempts = attempts_of(run_dir)
    current = attempts[-1] if attempts else 0
    records, lost = read_records(run_dir, current)
    expected = int(launch.get("world_size") or len(records))
    ranks = [_rank_row(record) for record in records if record.rank is not None]
    ranks.sort(key=lambda row: row["rank"])
    present = {row["rank"] for row in ranks}
    ranks += [_lost_row(rank) for rank in range(expected) if rank not in present]
    ranks.sort(key=lambda row: row["rank"])
    known = {key: value for key, value in (job or {}).items() if value is not None}
    job = {**_job(launch, status, current), **known}
    first = _first_failure(ranks, str(job.get("state")))
    return {
        "schema": SCHEMA,
        "job": job,
        "ranks": ranks,
        "summary": _summary(ranks, records, lost),
        "estimate": read_json(run_dir / "estimate.json"),
        "attempts": [
            {"attempt": number, "ranks": len(read_records(run_dir, number)[0])}
            for number in attempts
        ],
        "diagnosis": _diagnosis(job, ranks, first),
        "first_failure": first,
        "run_dir": str(run_dir),
        "ignored_rules": launch.get("ignored_rules", []),
        "created_s": time.time(),
    }


def _job(launch: Mapping[str, Any], status: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    started, ended = status.get("started_s"), status.get("ended_s")
    return {
        "id": status.get("job_id"),
        "name": launch.get("name"),
        "state": status.get("state"),
        "exit_code": status.get("exit_code"),
        "restarts": attempt,
        "elapsed_s": ended - started if started and ended else None,
    }


def _rank_row(record: RankRecord) -> dict[str, Any]:
    process, ended = record.process, record.exit
    if ended.get("pid") != process.get("pid", ended.get("pid")):
        ended = {}  # of an earlier start of the same script: `sbatch job.sbatch` once more
    peaks = [memory.get("host_peak_bytes") or 0 for memory in (process, ended)]
    complete = bool(ended) and process.get("phase") in ("ended", "refused")
    number = ended.get("signal")
    if number:
        how = f"killed by {_signal_name(number)}"
    elif ended:
        how = "out of memory" if process.get("oom") else "exited"
    else:
        how = "lost: no end recorded"
    if process.get("peak_allocated_bytes") is not None:
        source = "allocator at exit" if complete else "allocator, last sample"
    else:
        source = "host memory"
    return {
        "rank": record.rank,
        "local_rank": record.local_rank,
        "node": process.get("node", record.node),
        "gpu": process.get("gpu"),
        **{name: process.get(name) for name in _PEAKS},
        "peak_host_bytes": max(peaks) or None,
        "exit_code": ended.get("exit_code"),
        "signal": number,
        "ended": how,
        "source": source,
        "complete": complete,
        "started_s": process.get("started_s"),
        "ended_s": ended.get("ended_s"),
        "last_record_s": process.get("updated_s"),
        "error": process.get("error"),
        "versions": process.get("versions"),
        "modules": process.get("modules"),
    }


def _lost_row(rank: int) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        ("local_rank", "node", "gpu", *_PEAKS, "peak_host_bytes", "exit_code", "signal")
    )
    return {"rank": rank, **row, "ended": "no record", "source": None, "complete": False}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _failed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("exit_code") or row.get("signal"))


def _first_failure(ranks: Iterable[Mapping[str, Any]], state: str) -> dict[str, Any] | None:
    """The rank that failed first. TERM is what the others get when Slurm ends the step."""
    failed = [row for row in ranks if _failed(row)]
    own = [row for row in failed if row.get("signal") != signal.SIGTERM]
    candidates = own or ([] if state in _ENDED_FROM_OUTSIDE else failed)
    if not candidates:
        return None
    row = min(candidates, key=lambda one: (one.get("ended_s") or float("inf"), one["rank"]))
    return {"rank": row["rank"], "node": row["node"], "time": row.get("ended_s")}


def _summary(
    ranks: list[dict[str, Any]], records: list[RankRecord], lost: list[str]
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "ranks": len(ranks),
        "recorded": sum(row["source"] is not None for row in ranks),
        "complete": sum(row["complete"] for row in ranks),
        "failed": sum(_failed(row) for row in ranks),
        "unreadable": lost,
    }
    for name in (*_PEAKS, "peak_host_bytes"):
        values = sorted((row[name], row["rank"]) for row in ranks if row[name] is not None)
        summary[name] = (
            {
                "min": values[0][0],
                "median": values[len(values) // 2][0],
                "max": values[-1][0],
                "max_rank": values[-1][1],
            }
            if values
            else None
        )
    modules = [record.process["modules"] for record in records if record.process.get("modules")]
    summary["modules"] = modules[0] if modules else None
    return summary


def _diagnosis(
    job: Mapping[str, Any], ranks: list[dict[str, Any]], first: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Never empty for a job that failed; says no more than the records show."""
    state = str(job.get("state") or "")
    if first is None:
        if state in ("", "COMPLETED", "RUNNING", "PENDING", "COMPLETING"):
            return []
        evidence = f"the scheduler says {state}; no rank recorded a failure of its own"
        label = "preempted_requeued" if state == "PREEMPTED" else "unknown"
        return [{"label": label, "rank": None, "evidence": evidence, "advice": ""}]
    row = next(one for one in ranks if one["rank"] == first["rank"])
    where = f"rank {row['rank']} on {row['node']}"
    error = row.get("error")
    if error and error.startswith("environment:"):
        label = "launch_failure"
        advice = "make what changed the variable keep it, or set it in env:"
        evidence = f"{where}: {error}"
    elif row["ended"] == "out of memory":
        label, evidence = "gpu_capacity", f"{where}: {error}"
        advice = "compare the estimate's largest component with the card"
    elif row["signal"]:
        label = "task_failure"
        evidence = f"{where} was {row['ended']}"
        advice = (
            "SIGKILL from outside: the host's OOM killer, an operator, or a health check; see dmesg"
            if row["signal"] == signal.SIGKILL
            else ""
        )
    else:
        label, advice = "task_failure", "see the log of that rank"
        evidence = f"{where} exited with {row['exit_code']}" + (f": {error}" if error else "")
    return [{"label": label, "rank": row["rank"], "evidence": evidence, "advice": advice}]
