"""How Megatron cuts the layers into pipeline stages and virtual stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtlaunch.preflight.plan import Plan


class LayoutError(ValueError):
    """A layout text that Megatron's parser refuses."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model chunk: the layers of one virtual stage on one pipeline rank."""

    decoder_layers: int
    mtp_layers: int = 0
    embedding: bool = False
    loss: bool = False


def parse_layout(text: str) -> list[str]:
    """The stages of a layout text, in order, as strings of E, t, m and L.

    "Et*3|(tt|)*2tL" is "Ettt|tt|tt|tL": `|` ends a stage, `x*n` and `(...)*n` repeat, commas are
    cosmetic. Same two passes as PipelineParallelLayerLayout.parse_str_to_list (megatron/core/
    transformer/pipeline_parallel_layer_layout.py, 0.16.1). Raises LayoutError.

    >>> parse_layout("Et*2|(tt|)*2tL")
    ['Ett', 'tt', 'tt', 'tL']
    """
    layout = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda m: m[1] * int(m[2]), layout)
    stages = layout.split("|")
    wrong = sorted(set("".join(stages)) - set("EtmL"))
    if wrong:
        raise LayoutError(f"'{wrong[0]}' is none of E (embedding), t (decoder), m (MTP), L (loss)")
    return stages


def chunks(plan: Plan) -> tuple[tuple[Chunk, ...], ...] | None:
    """Chunks by pipeline rank, `result[rank][virtual_stage]`; None where Megatron refuses.

    Source: get_num_layers_to_build (megatron/core/transformer/transformer_block.py) and, for
    layouts, PipelineParallelLayerLayout.
    """
    if plan.num_layers is None:
        return None
    if plan.layout is not None:
        try:
            stages = parse_layout(plan.layout)
        except LayoutError:
            return None
        if len(stages) % plan.pp:
            return None
        return _interleave(plan, [_layout_chunk(stage) for stage in stages])
    per_rank = layers_per_rank(plan)
    virtual = plan.vpp or 1
    if per_rank is None or any(count % virtual for count in per_rank):
        return None
    mtp = plan.mtp_num_layers or 0
    result = []
    for rank, count in enumerate(per_rank):
        row = []
        for stage in range(virtual):
            first = rank == 0 and stage == 0
            last = rank == plan.pp - 1 and stage == virtual - 1
            layers = count // virtual
            layers -= first and plan.account_for_embedding
            layers -= last and plan.account_for_loss
            if layers < 0:
                return None
            row.append(Chunk(layers, mtp if last else 0, first, last))
        result.append(tuple(row))
    return tuple(result)


def layers_per_rank(plan: Plan) -> list[int] | None:
    """Layers of each pipeline rank, an embedding or loss that counts as a layer included."""
    assert plan.num_layers is not None
    first, last = plan.first_stage_layers, plan.last_stage_layers
    if first is None and last is None:
        total = plan.num_layers + plan.account_for_embedding + plan.account_for_loss
        return None if total % plan.pp else [total // plan.pp] * plan.pp
    if any(count is not None and count < 1 for count in (first, last)):
        return None
    left = plan.num_layers - (first or 0) - (last or 0)
    middle = plan.pp - (first is not None) - (last is not None)
    if left < 0 or middle < 0 or (middle == 0) != (left == 0) or (middle and left % middle):
        return None
    per_rank = [left // middle if middle else 0] * plan.pp
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    return per_rank


def _layout_chunk(stage: str) -> Chunk:
    return Chunk(stage.count("t"), stage.count("m"), "E" in stage, "L" in stage)


def _interleave(plan: Plan, stages: Sequence[Chunk]) -> tuple[tuple[Chunk, ...], ...]:
    """Stage i of the layout is virtual stage i // PP of rank i % PP."""
    virtual = len(stages) // plan.pp
    return tuple(
        tuple(stages[stage * plan.pp + rank] for stage in range(virtual))
        for rank in range(plan.pp)
    )
