"""Slurm's way of writing a time."""

from __future__ import annotations

import re


def time_limit_s(text: str) -> float | None:
    """Seconds of sbatch's --time: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for no limit.

    >>> [time_limit_s(t) for t in ("90", "1:30", "04:00:00", "1-12", "1-0:0:5", "UNLIMITED")]
    [5400.0, 90.0, 14400.0, 129600.0, 86405.0, None]
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        hours, minutes, seconds = (numbers + [0, 0])[:3]
    elif len(numbers) == 1:
        hours, minutes, seconds = 0, numbers[0], 0
    elif len(numbers) == 2:
        hours, minutes, seconds = 0, numbers[0], numbers[1]
    else:
        hours, minutes, seconds = numbers
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def warning_before_s(signal: str) -> int | None:
    """Seconds before the limit of sbatch's --signal; its default is 60.

    >>> warning_before_s("B:USR1@120"), warning_before_s("TERM"), warning_before_s("")
    (120, 60, None)
    """
    match = re.fullmatch(r"(?:[BR]+:)?(?:SIG)?\w+(?:@(\d+))?", signal)
    return None if match is None else int(match[1] or 60)
