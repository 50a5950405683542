"""Merges the records of a run into `report.json` (schema mtlaunch.report/1).

Used by the epilog on the first node of the job and again by `mtlaunch report`, so that a report
never depends on one hook having run. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtlaunch.launcher.runner.outcome import EXIT_NEAR_LIMIT, FINAL_STATES
from mtlaunch.launcher.runner.record import RankRecord, read_file

SCHEMA = "mtlaunch.report/1"

# States that a job gets without a fault of a rank: label of the diagnosis, what happened.
_ENDED_FROM_OUTSIDE = {
    "CANCELLED": ("unknown", "cancelled"),
    "DEADLINE": ("unknown", "deadline"),
    "NODE_FAIL": ("node_failure", "a node failed"),
    "PREEMPTED": ("preempted_requeued", "preempted"),
    "TIMEOUT": ("unknown", "time limit"),
}

# `ended` of a rank that recorded no end: in a job that is over, that runs, of unknown state.
_KILLED, _RUNNING, _LOST = "killed: no end recorded", "running", "lost: no end recorded"

# TERM reaches script and waiting parent at the same time; the parent may note it this much later
# than the script's handler raises.
_TERM_SLACK_S = 0.05

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


def newest_starts(records: Iterable[RankRecord]) -> tuple[list[RankRecord], list[str]]:
    """One record a rank, the one that started last, and a sentence for each of the others.

    There are others after a second `sbatch job.sbatch` that got other nodes, or a copied file.
    """
    kept: dict[int, RankRecord] = {}
    others: list[str] = []
    for record in records:
        rank = record.rank
        if rank is None:
            continue
        before = kept.get(rank, record)
        newer, older = (record, before) if _age(record) > _age(before) else (before, record)
        kept[rank] = newer
        if older is not newer:
            others.append(f"{older.file}: rank {rank} is taken from {newer.file}")
    return list(kept.values()), others


def _age(record: RankRecord) -> tuple[float, float, float]:
    process = record.process
    return (
        process.get("started_s") or 0.0,
        process.get("updated_s") or 0.0,
        record.exit.get("ended_s") or 0.0,
    )


def build(
    run_dir: Path,
    job: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of a run from what lies in its folder.

    `job` is the scheduler's word on it; `status` stands for status.json, which may not have been
    written.
    """
    launch = read_json(run_dir / "payload" / "launch.json") or {}
    if status is None:
        status = read_json(run_dir / "status.json") or {}
    attempts = attempts_of(run_dir)
    current = attempts[-1] if attempts else 0
    known = {key: value for key, value in (job or {}).items() if value is not None}
    endless = _without_end(known.get("state"), status, current)
    job = {**_job(launch, status, current), **known}
    if job.get("state") not in FINAL_STATES:
        job["exit_code"] = None  # Slurm shows 0 as long as a job runs
    found, lost = read_records(run_dir, current)
    records, superseded = newest_starts(found)
    expected = int(launch.get("world_size") or len(records))
    ranks = [_rank_row(record, endless) for record in records]
    present = {row["rank"] for row in ranks}
    ranks += [_lost_row(rank) for rank in range(expected) if rank not in present]
    ranks.sort(key=lambda row: row["rank"])
    first = _first_failure(ranks, str(job.get("state")))
    return {
        "schema": SCHEMA,
        "job": job,
        "ranks": ranks,
        "summary": {**_summary(ranks, records), "unreadable": lost, "superseded": superseded},
        "estimate": read_json(run_dir / "estimate.json"),
        "attempts": [
            {"attempt": number, "ranks": len(newest_starts(read_records(run_dir, number)[0])[0])}
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


def _without_end(state: str | None, status: Mapping[str, Any], attempt: int) -> str:
    """What became of a rank that has a record and no end in it; `state` is the scheduler's word.

    SIGKILL of a whole rank leaves nobody to record its end: the OOM killer of a cgroup,
    `scancel --signal=KILL`, Slurm's KillWait.
    """
    over = bool(status.get("ended_s")) and (status.get("attempt") or 0) >= attempt
    if over or state in FINAL_STATES:
        return _KILLED
    state = state or status.get("state")
    # between two attempts nothing runs, and the first may have ended in any way
    return _LOST if not state or state.startswith(("PENDING", "REQUEUE")) else _RUNNING


def _rank_row(record: RankRecord, endless: str) -> dict[str, Any]:
    process, ended = record.process, record.exit
    if ended.get("pid") != process.get("pid", ended.get("pid")):
        ended = {}  # of an earlier start of the same script: `sbatch job.sbatch` once more
    term_s = ended.get("term_s")
    if ended.get("ended_s") is None:
        ended = {}
    peaks = [memory.get("host_peak_bytes") or 0 for memory in (process, ended)]
    complete = bool(ended) and process.get("phase") in ("ended", "refused")
    how = _how_it_ended(process, ended, endless)
    noted = process.get("error_s") is not None
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
        "signal": ended.get("signal"),
        "ended": how,
        "failed": bool(ended.get("exit_code") or ended.get("signal") or noted or how == _KILLED),
        "source": source,
        "complete": complete,
        "started_s": process.get("started_s"),
        "ended_s": ended.get("ended_s"),
        "term_s": term_s,
        "error_s": process.get("error_s"),
        "last_record_s": process.get("updated_s"),
        "error": process.get("error"),
        "traceback": process.get("traceback"),
        "versions": process.get("versions"),
        "modules": process.get("modules"),
    }


def _how_it_ended(process: Mapping[str, Any], ended: Mapping[str, Any], endless: str) -> str:
    """An error that the rank noted comes before the signal that ended it afterwards."""
    number = ended.get("signal")
    if process.get("oom"):
        return "out of memory"
    if process.get("error_s") is not None and (number or not ended):
        return "error"
    if number:
        return f"killed by {_signal_name(number)}"
    return "exited" if ended else endless


def _lost_row(rank: int) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        ("local_rank", "node", "gpu", *_PEAKS, "peak_host_bytes", "exit_code", "signal")
    )
    row |= {"ended": "no record", "failed": False, "source": None, "complete": False}
    return {"rank": rank, **row}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _failed_s(row: Mapping[str, Any]) -> float:
    """When a rank failed, as near as its record tells."""
    times = (row.get(name) for name in ("error_s", "ended_s", "last_record_s"))
    return next((time_s for time_s in times if time_s is not None), float("inf"))


def _was_told_to_end(row: Mapping[str, Any]) -> bool:
    """Whether TERM came before the failure: what the others get when Slurm ends a step."""
    error_s, ended_s, term_s = row.get("error_s"), row.get("ended_s"), row.get("term_s")
    if term_s is None:
        return bool(error_s is None and row.get("signal") == signal.SIGTERM)
    failed_s = error_s if error_s is not None else ended_s
    return failed_s is None or bool(term_s <= failed_s + _TERM_SLACK_S)


# What a rank says that lost another one: gloo (transport/tcp/pair.cc), NCCL (ncclRemoteError,
# socket.cc), torch's store and its watchdog.
_PEER_WORDS = re.compile(
    r"connection (reset|closed|refused)|broken pipe|remote process exited|remote peer"
    r"|socket (timeout|closed)|connection was likely closed|watchdog caught collective",
    re.IGNORECASE,
)


def _lost_a_peer(row: Mapping[str, Any]) -> bool:
    """Whether a rank's error is likely what another rank's end did to it."""
    return bool(_PEER_WORDS.search(row.get("error") or ""))


def _first_failure(ranks: Iterable[Mapping[str, Any]], state: str) -> dict[str, Any] | None:
    """The rank that failed first, if the job was not ended from outside before that."""
    rows = list(ranks)
    failed = [row for row in rows if row["failed"]]
    own = [row for row in failed if not _was_told_to_end(row)]
    if state in _ENDED_FROM_OUTSIDE:
        candidates = [row for row in own if row.get("error_s") is not None]
        if state == "NODE_FAIL":
            # The others get errors of their connections to the ranks that are gone.
            gone = [row.get("last_record_s") or 0.0 for row in rows if not row.get("ended_s")]
            candidates = [row for row in candidates if row["error_s"] < min(gone, default=0.0)]
    else:
        candidates = own or failed
    if not candidates:
        return None
    # The rank that is gone is recorded a moment after the others have noticed it.
    row = min(candidates, key=lambda one: (_lost_a_peer(one), _failed_s(one), one["rank"]))
    failed_s = _failed_s(row)
    return {
        "rank": row["rank"],
        "node": row["node"],
        "time": None if failed_s == float("inf") else failed_s,
    }


def _summary(ranks: list[dict[str, Any]], records: list[RankRecord]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "ranks": len(ranks),
        "recorded": sum(row["source"] is not None for row in ranks),
        "complete": sum(row["complete"] for row in ranks),
        "failed": sum(row["failed"] for row in ranks),
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


def _finding(label: str, rank: int | None, evidence: str, advice: str = "") -> dict[str, Any]:
    return {"label": label, "rank": rank, "evidence": evidence, "advice": advice}


def _diagnosis(
    job: Mapping[str, Any], ranks: list[dict[str, Any]], first: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Never empty for a job that failed; says no more than the records show."""
    if first is None:
        return _without_failure(job, ranks)
    state = str(job.get("state"))
    row = next(one for one in ranks if one["rank"] == first["rank"])
    return [_of_rank(row, [one for one in ranks if one is not row], state)]


def _without_failure(
    job: Mapping[str, Any], ranks: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Of a job in which no rank failed by itself."""
    state = str(job.get("state") or "")
    if state == "COMPLETED" or state not in FINAL_STATES:
        return []
    if state in _ENDED_FROM_OUTSIDE:
        label, what = _ENDED_FROM_OUTSIDE[state]
        said = f"{what}: the scheduler says {state}, and no rank noted an error before"
        return [_finding(label, None, said)]
    if job.get("exit_code") == EXIT_NEAR_LIMIT:
        said = "stopped before the time limit, as asked"
        return [_finding("preempted_requeued", None, said, "resume from the checkpoint")]
    if not any(row["source"] for row in ranks):
        said = f"the scheduler says {state}; no rank started"
        return [_finding("launch_failure", None, said, "see the job's log: mtlaunch logs")]
    said = f"the scheduler says {state}; no rank recorded a failure of its own"
    return [_finding("unknown", None, said)]


def _of_rank(
    row: Mapping[str, Any], others: Iterable[Mapping[str, Any]], state: str
) -> dict[str, Any]:
    """Why the rank that failed first did."""
    rank, where = row["rank"], f"rank {row['rank']} on {row['node']}"
    error, how = row.get("error"), row["ended"]
    if error and error.startswith("environment:"):
        advice = "make what changed the variable keep it, or set it in env:"
        return _finding("launch_failure", rank, f"{where}: {error}", advice)
    if how == "out of memory":
        advice = "compare the estimate's largest component with the card"
        return _finding("gpu_capacity", rank, f"{where}: {error or how}", advice)
    if how == _KILLED:
        said = f"{where}: the whole rank was killed (SIGKILL) {_after_last_record(row, others)}"
        advice = "the host's OOM killer, an operator, or a health check; see dmesg"
        if state == "OUT_OF_MEMORY":
            advice = "it needed more host memory than the job asked for: slurm.mem"
        return _finding("task_failure", rank, said, advice)
    if how == "error":
        end = f", then {_signal_name(row['signal'])}" if row["signal"] else ""
        said = f"{where} failed: {error or 'an error'}{end}"
        return _finding("task_failure", rank, said, "see the log of that rank")
    if row["signal"]:
        advice = "SIGKILL from outside: the host's OOM killer, an operator, or a health check"
        advice = f"{advice}; see dmesg" if row["signal"] == signal.SIGKILL else ""
        return _finding("task_failure", rank, f"{where} was {how}", advice)
    said = f"{where} exited with {row['exit_code']}" + (f": {error}" if error else "")
    return _finding("task_failure", rank, said, "see the log of that rank")


def _after_last_record(row: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """The kill itself is not recorded; what happened to another rank next bounds it."""
    last_s = row.get("last_record_s")
    names = ("error_s", "term_s", "ended_s")
    times = [other[name] for other in others for name in names if other.get(name) is not None]
    later = [time_s - last_s for time_s in times if last_s is not None and time_s >= last_s]
    return f"at most {min(later):.1f} s after its last record" if later else "at its last record"
