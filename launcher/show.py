"""What people see in a terminal: findings, estimates, environment, reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from mtlaunch.launcher.runner.outcome import FINAL_STATES
from mtlaunch.preflight.rule import Finding
from mtlaunch.preflight.yaml_text import JobFileError, Place

if TYPE_CHECKING:
    from mtlaunch.preflight.environment import Variable
    from mtlaunch.preflight.memory import Estimate
    from mtlaunch.preflight.verdict import Verdict

GIB = 2**30

# Components below this share of a rank's total are left to --format json.
_SHOWN_SHARE = 0.001

_TRACEBACK_LINES = 8

SHAPE_NOT_KNOWN = "the model's shape is not known"

_COLOURS = {"error": "31;1", "warning": "33;1", "info": "36", "ok": "32;1", "dim": "2", "bold": "1"}


def colours_wanted(stream: IO[str]) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Printer:
    """Lines to one stream, coloured where a person looks."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream or sys.stdout
        self._coloured = colours_wanted(self.stream)

    def paint(self, text: str, kind: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self._coloured else text

    def line(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def table(self, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
        """A table by rich; `columns` are (heading, "left" or "right")."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for heading, side in columns:
            table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        width = None if self.stream.isatty() else 200
        Console(file=self.stream, width=width, highlight=False, markup=False).print(table)


def gib(count: float | None) -> str:
    """Bytes as people compare them with a card.

    >>> gib(84932978278), gib(None), gib(123456789)
    ('79.1 GiB', '-', '118 MiB')
    """
    if count is None:
        return "-"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def problems(printer: Printer, error: JobFileError, source: str = "") -> None:
    for problem in error.problems:
        head = f"{printer.paint('error', 'error')}: {problem.message}"
        printer.line(f"{problem.place}: {head}")
        _source_line(printer, problem.place, source or error.source)
        if problem.hint:
            printer.line(f"  fix: {problem.hint}")


def findings(printer: Printer, verdict: Verdict, source: str) -> None:
    for finding in verdict.findings:
        _finding(printer, finding, verdict, source)


def _finding(printer: Printer, finding: Finding, verdict: Verdict, source: str) -> None:
    level = printer.paint(f"{finding.level} {finding.id}", finding.level)
    option = finding.option
    if not option.startswith(("env.", "slurm.", "lora.", "cluster.")):
        option = verdict.plan.spelling(option)
    message = finding.message
    shown = message if message.startswith(option) else f"{option}: {message}"
    printer.line(f"{finding.where}: {level} {shown}")
    if finding.where is not None:
        _source_line(printer, finding.where, source)
    if finding.hint:
        printer.line(f"  fix: {finding.hint}")
    printer.line(printer.paint(f"  more: mtlaunch explain {finding.id}", "dim"))


def _source_line(printer: Printer, place: Place, source: str) -> None:
    lines = source.splitlines()
    if not 0 < place.line <= len(lines):
        return
    number = str(place.line)
    text = lines[place.line - 1]
    printer.line(printer.paint(f"  {number} | {text}", "dim"))
    indent = "".join("\t" if char == "\t" else " " for char in text[: place.column - 1])
    printer.line(printer.paint(f"  {' ' * len(number)} | {indent}", "dim") + "^")


def verdict_lines(printer: Printer, verdict: Verdict) -> None:
    counts = {level: 0 for level in ("error", "warning", "info")}
    for finding in verdict.findings:
        counts[finding.level] += 1
    said = ", ".join(f"{n} {level}{'s' * (n != 1)}" for level, n in counts.items() if n)
    word = printer.paint("refused", "error") if verdict.refused else printer.paint("accepted", "ok")
    printer.line(f"{verdict.plan.file}: {word}" + (f" ({said})" if said else ""))
    if verdict.estimate is None:
        unknown_shape(printer, "  ")
    else:
        printer.line(f"  memory: {estimate_sentence(verdict.estimate)}")
    versions = ", ".join(
        f"{name.replace('_', '-')} {value or 'unknown'}"
        for name, value in _versions(verdict).items()
    )
    printer.line(printer.paint(f"  assumed: {versions}", "dim"))


def _versions(verdict: Verdict) -> Mapping[str, str | None]:
    from mtlaunch.preflight.verdict import assumed_versions

    return assumed_versions(verdict.plan)


def unknown_shape(printer: Printer, indent: str = "") -> None:
    printer.line(f"{indent}memory: fits: unknown ({SHAPE_NOT_KNOWN})")


def estimate_sentence(estimate: Estimate) -> str:
    content = estimate.to_json()
    worst = next(
        rank for rank in content["ranks"] if rank["pipeline_rank"] == content["worst_pipeline_rank"]
    )
    needs = (
        f"pipeline rank {worst['pipeline_rank']} needs {gib(worst['device_bytes'])} "
        f"({gib(worst['device_low_bytes'])} to {gib(worst['device_high_bytes'])})"
    )
    gpu = content["gpu"]
    card = f" of {gib(gpu['capacity_bytes'])} on {gpu['name']}" if gpu else ", GPU not named"
    sentence = f"{needs}{card}; fits: {content['fits']}"
    if content["not_modelled"]:
        sentence += f" (not modelled: {', '.join(content['not_modelled'])})"
    return sentence


def estimate(printer: Printer, content: Mapping[str, Any]) -> None:
    """A row a pipeline rank, the components of the worst below."""
    gpu = content["gpu"]
    parallel = " ".join(f"{k.upper()}{v}" for k, v in content["parallel"].items() if v)
    name = gpu["name"] if gpu else "GPU not named"
    printer.line(f"{content['world_size']} ranks, {parallel}, {name}")
    capacity = gpu["capacity_bytes"] if gpu else None
    worst = content["ranks"][content["worst_pipeline_rank"]]
    unit, size = ("GiB", GIB) if worst["device_bytes"] >= GIB else ("MiB", 2**20)
    rows = []
    for rank in content["ranks"]:
        share = rank["device_bytes"] / capacity if capacity else 0.0
        low, high = rank["device_low_bytes"] / size, rank["device_high_bytes"] / size
        mark = " worst" if rank is worst else ""
        rows.append(
            (
                str(rank["pipeline_rank"]),
                f"{rank['parameters'] / 1e6:,.1f}",
                *(f"{rank[name] / size:.1f}" for name in ("steady_bytes", "peak_bytes")),
                f"{rank['device_bytes'] / size:.1f}",
                f"{low:.1f} - {high:.1f}",
                (f"{bar(share)} {share:4.0%}" if capacity else "") + mark,
            )
        )
    heads = ("pp", "1e6 params", f"steady {unit}", "peak", "device", "low - high")
    card = f"of {capacity / size:.1f} {unit}" if capacity else ""
    printer.table([*((head, "right") for head in heads), (card, "left")], rows)
    printer.line(f"components of pipeline rank {worst['pipeline_rank']}:")
    for name, count in sorted(worst["components"].items(), key=lambda item: -item[1]):
        if count >= _SHOWN_SHARE * worst["device_bytes"]:
            printer.line(f"  {gib(count):>10}  {name.replace('_', ' ')}")
    printer.line(f"fits: {content['fits']}")
    for title, key in (("assumed", "assumptions"), ("not modelled", "not_modelled")):
        for one in content[key]:
            printer.line(printer.paint(f"  {title}: {one}", "dim"))


def bar(share: float, width: int = 10) -> str:
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


def environment(printer: Printer, block: Sequence[Variable]) -> None:
    for variable in block:
        if variable.value is None:
            head = printer.paint(f"unset {variable.name}", "dim")
        else:
            head = printer.paint(f"{variable.name}={variable.value}", "bold")
        printer.line(f"{head}  [{variable.layer}]")
        printer.line(f"    {variable.reason}")
        if variable.source:
            printer.line(printer.paint(f"    source: {variable.source}", "dim"))


def report(printer: Printer, content: Mapping[str, Any], all_ranks: bool = False) -> None:
    """Header, table with a row a rank, the estimate beside it, the diagnosis."""
    job, rows = content["job"], content["ranks"]
    state = str(job.get("state") or "UNKNOWN")
    kind = "error" if state in FINAL_STATES else "bold"
    word = printer.paint(state, "ok" if state == "COMPLETED" else kind)
    elapsed = f", {job['elapsed_s']:.0f} s" if job.get("elapsed_s") is not None else ""
    code = f", exit code {job['exit_code']}" if job.get("exit_code") is not None else ""
    printer.line(f"job {job.get('id')} ({job.get('name')}): {word}{code}{elapsed}")
    for one in content["diagnosis"]:
        printer.line(f"{printer.paint(one['label'], 'error')}: {one['evidence']}")
        if one["advice"]:
            printer.line(f"  advice: {one['advice']}")
    _traceback(printer, content)
    shown = rows if all_ranks or len(rows) <= 64 else _folded(rows)
    gpu = any(row.get("peak_reserved_bytes") is not None for row in rows)
    columns = [("rank", "right"), ("node", "left")]
    columns += [(name, "right") for name in ("allocated", "reserved", "device")] if gpu else []
    columns += [("host", "right"), ("exit", "right"), ("ended", "left"), ("evidence", "left")]
    table = []
    for row in shown:
        cells = [str(row["rank"]), row["node"] or "-"]
        if gpu:
            cells += [
                gib(row[f"peak_{name}_bytes"]) for name in ("allocated", "reserved", "device")
            ]
        exit_code = "-" if row["exit_code"] is None else str(row["exit_code"])
        cells += [gib(row["peak_host_bytes"]), exit_code, row["ended"], row["source"] or "none"]
        table.append(cells)
    printer.table(columns, table)
    if len(shown) < len(rows):
        printer.line(f"{len(rows) - len(shown)} more ranks: --all shows them")
    _modules(printer, content["summary"].get("modules"))
    _beside(printer, content, gpu)
    for lost in content["summary"]["unreadable"]:
        printer.line(f"not readable: {lost}")
    for older in content["summary"]["superseded"]:
        printer.line(f"not shown: {older}")


def _traceback(printer: Printer, content: Mapping[str, Any]) -> None:
    """The end of the traceback of the rank that failed first, which one of many logs holds."""
    first = content["first_failure"]
    if first is None:
        return
    row = next(one for one in content["ranks"] if one["rank"] == first["rank"])
    lines = (row.get("traceback") or "").rstrip().splitlines()[-_TRACEBACK_LINES:]
    for line in lines:
        printer.line(printer.paint(f"    {line}", "dim"))


def _folded(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Failed ranks and the largest peaks, in rank order."""

    def peak(row: Mapping[str, Any]) -> int:
        return row.get("peak_allocated_bytes") or row.get("peak_host_bytes") or 0

    failed = [row for row in rows if row["failed"] or not row["source"]]
    largest = sorted(rows, key=peak, reverse=True)[:16]
    chosen = {row["rank"]: row for row in (*failed[:32], *largest)}
    return [chosen[rank] for rank in sorted(chosen)]


def _modules(printer: Printer, modules: Mapping[str, Any] | None) -> None:
    lora = (modules or {}).get("lora")
    if not lora:
        return
    parts = []
    for one in lora.get("decisions", []):
        reason = f" ({one['reason']})" if one.get("reason") else ""
        parts.append(f"{one['count']} {one['surface']}: {one['uses']}{reason}")
    printer.line(f"LoRA on {lora.get('attached')} modules, asked for {lora.get('variant')}:")
    for part in parts:
        printer.line(f"  {part}")


def _beside(printer: Printer, content: Mapping[str, Any], gpu: bool) -> None:
    estimate = content.get("estimate")
    if not estimate:
        return
    worst = estimate["ranks"][estimate["worst_pipeline_rank"]]
    line = (
        f"estimate: pipeline rank {worst['pipeline_rank']} peaks at {gib(worst['peak_bytes'])} "
        f"allocated ({gib(worst['peak_low_bytes'])} to {gib(worst['peak_high_bytes'])})"
    )
    measured = content["summary"].get("peak_allocated_bytes")
    if measured:
        ratio = measured["max"] / worst["peak_bytes"]
        line += f"; measured {gib(measured['max'])} on rank {measured['max_rank']}, {ratio:.2f} x"
    elif not gpu:
        line += " on a GPU; these ranks had none, so only host memory was measured"
    printer.line(line)
