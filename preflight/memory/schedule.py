"""How many microbatches a pipeline rank holds activations for.

Source: megatron/core/pipeline_parallel/schedules.py (0.16.1): get_pp_rank_microbatches,
get_schedule_table, forward_backward_pipelining_with(out)_interleaving.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Just after a forward pass: microbatches held by virtual stage, and the stage that ran."""

    held: tuple[int, ...]
    forwarded: int


def warmup_forwards(
    pp: int, rank: int, virtual: int, group: int, microbatches: int, overlap: bool = False
) -> int:
    """Forward passes before the first backward pass, in (microbatch, virtual stage) pairs.

    p-r-1 without interleaving; 2(p-r-1) + (v-1)G with, one more with
    overlap_moe_expert_parallel_comm; never more than there are.
    """
    if pp == 1:
        return 0
    if virtual == 1:
        count = pp - rank - 1
    else:
        count = 2 * (pp - rank - 1) + (virtual - 1) * group + overlap
    return min(count, microbatches * virtual)


@functools.lru_cache(maxsize=4096)
def moments(
    pp: int, rank: int, virtual: int, group: int, microbatches: int, overlap: bool = False
) -> tuple[Moment, ...]:
    """The distinct moments of one rank at which it holds most.

    Without interleaving, one: min(microbatches, p-r) microbatches. With it, warm-up forwards plus
    one, over one turn of the schedule; which virtual stages they belong to changes on the way.
    """
    warmup = warmup_forwards(pp, rank, virtual, group, microbatches, overlap)
    total = microbatches * virtual
    if virtual == 1:
        return (Moment((min(warmup + 1, microbatches),), 0),)
    if warmup >= total:
        return (Moment((microbatches,) * virtual, virtual - 1),)
    # one turn is group * virtual forwards; a last, smaller group holds no more than a full one
    order = _order(microbatches, virtual, group, min(total, warmup + group * virtual))
    held = [0] * virtual
    found = []
    for position, stage in enumerate(order):
        held[stage] += 1
        if position < warmup:
            continue
        found.append(Moment(tuple(held), stage))
        # backward passes follow the same table from the last virtual stage down
        held[virtual - 1 - order[position - warmup]] -= 1
    return tuple(dict.fromkeys(found))


def _order(microbatches: int, virtual: int, group: int, length: int) -> list[int]:
    """Virtual stage of each forward pass in order: groups of microbatches, stage by stage."""
    order: list[int] = []
    for first in range(0, microbatches, group):
        size = min(group, microbatches - first)
        for stage in range(virtual):
            order.extend([stage] * size)
        if len(order) >= length:
            break
    return order[:length]
