"""How findings word their fixes: options as the user's framework writes them, lists of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtlaunch.preflight.plan import Plan


def assign(plan: Plan, option: str, value: Any = True) -> str:
    """An option with its value, as it is typed: `--use-x`, `--x 4`, or `x=4` for Megatron-Bridge.

    >>> assign(Plan(), "micro-batch-size", 2), assign(Plan(), "sequence-parallel")
    ('--micro-batch-size 2', '--sequence-parallel')
    >>> assign(Plan(framework="megatron-bridge"), "num-virtual-stages-per-pipeline-rank", 2)
    'virtual_pipeline_model_parallel_size=2'
    """
    word = plan.spelling(option)
    if plan.is_bridge:
        return f"{word}={str(value).lower() if isinstance(value, bool) else value}"
    return word if value is True else f"{word} {value}"


def either(values: Sequence[Any], word: str = "or") -> str:
    """
    >>> either([2, 4, 8]), either([1, 5]), either(["3"])
    ('2, 4 or 8', '1 or 5', '3')
    """
    *most, last = map(str, values)
    return f"{', '.join(most)} {word} {last}" if most else last


def layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [one for one in range(1, number + 1) if number % one == 0]


def nearest(values: Sequence[int], to: int, count: int = 4) -> list[int]:
    """The `count` values nearest to one, in order.

    >>> nearest([1, 2, 4, 8, 16, 32], 8, 3)
    [4, 8, 16]
    """
    # at equal distance the smaller one; the ratio, since sizes are chosen by factors
    close = sorted(values, key=lambda one: (max(one / to, to / one), one))[:count]
    return sorted(close)
