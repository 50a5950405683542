"""The estimate: every term of every pipeline rank, added up.

Between steps a rank holds state, workspaces and cached buffers. At the peak it holds the same
without the stage inputs, and the activations in flight and the loss tail; the device holds the
CUDA context, NCCL's buffers and fragmentation beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mtlaunch.preflight import layers
from mtlaunch.preflight.layers import Chunk
from mtlaunch.preflight.memory import (
    activations,
    device,
    lora,
    loss,
    parameters,
    schedule,
    scope,
    state,
    workspace,
)
from mtlaunch.preflight.memory.sizes import Sizes, sizes_of
from mtlaunch.preflight.plan import Plan

SCHEMA = "mtlaunch.estimate/1"

Fits = Literal["yes", "tight", "no", "unknown"]

MIB = 2**20

# Bounds of the allocated peak. Parameter state is exact arithmetic, buffers are not quite;
# activations and loss tail follow the software's version; the few MiB are masks, tokens and
# messages that no term counts. 98% of the measured runs with modelled features lie within
# (benchmarks/memory_accuracy.py); below are runs of one step only, whose peak is before Adam's
# states exist.
STATIC_BOUNDS = (0.99, 1.02)
DYNAMIC_BOUNDS = (0.93, 1.08)
UNCOUNTED_BYTES = 64 * MIB

# Routing is never balanced: measured MoE peaks drift up to 12% upward over a training.
MOE_DYNAMIC_HIGH = 1.20

# With features outside the model.
UNMODELLED_BOUNDS = (0.5, 1.5)


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """One pipeline rank. `components` add up to device_bytes."""

    pipeline_rank: int
    parameters: int
    steady_bytes: int
    peak_first_step_bytes: int
    peak_bytes: int
    peak_low_bytes: int
    peak_high_bytes: int
    device_bytes: int
    device_low_bytes: int
    device_high_bytes: int
    components: Mapping[str, int]

    def largest_component(self) -> tuple[str, int]:
        return max(self.components.items(), key=lambda item: item[1])


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of every pipeline rank, and whether the worst one fits."""

    gpu_name: str | None
    capacity_bytes: int | None
    world_size: int
    parallel: Mapping[str, int]
    ranks: tuple[RankEstimate, ...]
    fits: Fits
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    lora_saving_bytes: int = 0  # of regather or gather-free on the worst rank, over base

    @property
    def worst(self) -> RankEstimate:
        """The rank that needs most of its device."""
        return max(self.ranks, key=lambda rank: rank.device_bytes)

    @property
    def worst_pipeline_rank(self) -> int:
        return self.worst.pipeline_rank

    def to_json(self) -> dict[str, Any]:
        """The document `mtlaunch.estimate/1`."""
        gpu = None
        if self.gpu_name is not None:
            gpu = {"name": self.gpu_name, "capacity_bytes": self.capacity_bytes}
        return {
            "schema": SCHEMA,
            "gpu": gpu,
            "world_size": self.world_size,
            "parallel": dict(self.parallel),
            "ranks": [{**asdict(rank), "components": dict(rank.components)} for rank in self.ranks],
            "worst_pipeline_rank": self.worst_pipeline_rank,
            "fits": self.fits,
            "assumptions": list(self.assumptions),
            "not_modelled": list(self.not_modelled),
        }


def estimate(plan: Plan) -> Estimate | None:
    """Memory of every pipeline rank of a plan; None when the model's shape is not known."""
    s = sizes_of(plan)
    if s is None:
        return None
    split = layers.chunks(plan)
    missing = scope.not_modelled(s, split is not None)
    if split is None:
        split = even_split(plan)
    stages = _stages(s, split)
    ranks = tuple(_rank(s, rank, row, bool(missing)) for rank, row in enumerate(stages))
    gpu = plan.gpu
    capacity = None if gpu is None else gpu.capacity_bytes
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank].device_bytes)
    return Estimate(
        gpu_name=gpu.name if gpu is not None else plan.gpu_name,
        capacity_bytes=capacity,
        world_size=plan.world_size,
        parallel={
            "tp": plan.tp,
            "pp": plan.pp,
            "vpp": plan.vpp or 1,
            "cp": plan.cp,
            "ep": plan.ep,
            "etp": plan.etp,
            "dp": s.dp,
            "edp": s.edp,
        },
        ranks=ranks,
        fits=verdict(ranks, capacity, bool(missing)),
        assumptions=scope.assumptions(s),
        not_modelled=missing,
        lora_saving_bytes=lora.saving(s, sum(len(stage.kinds) for stage in stages[worst])),
    )


def verdict(ranks: Sequence[RankEstimate], capacity: int | None, unknown: bool) -> Fits:
    """What a card of this capacity means: a lower bound above it is "no", an upper one "tight"."""
    if capacity is None or unknown:
        return "unknown"
    if any(rank.device_low_bytes > capacity for rank in ranks):
        return "no"
    return "tight" if any(rank.device_high_bytes > capacity for rank in ranks) else "yes"


def even_split(plan: Plan) -> tuple[tuple[Chunk, ...], ...]:
    """A split for layouts that Megatron refuses, so that there are numbers: as even as it goes."""
    total, pp = plan.num_layers or 0, plan.pp
    share, rest = divmod(total, pp)
    return tuple(
        (Chunk(share + (rank < rest), 0, rank == 0, rank == pp - 1),) for rank in range(pp)
    )


def layer_indices(
    split: tuple[tuple[Chunk, ...], ...], num_layers: int
) -> tuple[tuple[range, ...], ...]:
    """Indices of the model's layers in each chunk: virtual stage by virtual stage, rank by rank."""
    rows: list[list[range]] = [[] for _ in split]
    first = 0
    for stage in range(max(map(len, split))):
        for rank, row in enumerate(split):
            count = row[stage].decoder_layers
            # a layout may name more layers than the model has; a rule reports that
            rows[rank].append(range(min(first, num_layers), min(first + count, num_layers)))
            first += count
    return tuple(map(tuple, rows))


@dataclass(frozen=True, slots=True)
class Stage:
    """One model chunk with its counts; `kinds` says of each layer whether it has experts."""

    chunk: Chunk
    kinds: tuple[bool, ...]
    counts: parameters.Counts
    activations: activations.Activations


def _stages(s: Sizes, split: tuple[tuple[Chunk, ...], ...]) -> list[list[Stage]]:
    """The chunks of every rank; layers are counted once for each kind, equal chunks once."""
    moe_layers = s.moe.expert_layers if s.moe is not None else (False,) * (s.plan.num_layers or 0)
    kinds = set(moe_layers)
    layer_counts = {kind: parameters.layer(s, kind) for kind in kinds}
    layer_activations = {kind: activations.layer(s, kind) for kind in kinds}
    known: dict[tuple[Chunk, tuple[bool, ...]], Stage] = {}

    def stage(one: Chunk, inside: tuple[bool, ...]) -> Stage:
        key = (one, inside)
        if key not in known:
            known[key] = Stage(
                one,
                inside,
                parameters.chunk(s, one, [layer_counts[kind] for kind in inside]),
                activations.chunk(s, one, [layer_activations[kind] for kind in inside]),
            )
        return known[key]

    indices = layer_indices(split, len(moe_layers))
    return [
        [
            stage(one, moe_layers[inside.start : inside.stop])
            for one, inside in zip(row, indices[rank], strict=True)
        ]
        for rank, row in enumerate(split)
    ]


def _rank(s: Sizes, rank: int, stages: Sequence[Stage], widened: bool) -> RankEstimate:
    row = [stage.chunk for stage in stages]
    kinds = [kind for stage in stages for kind in stage.kinds]
    counts = parameters.Counts(
        sum(stage.counts.dense for stage in stages), sum(stage.counts.expert for stage in stages)
    )
    static, first_step, total_parameters = _state(s, counts, len(kinds))
    buffers = {
        "library_workspaces": workspace.cublas(s) + workspace.te_gemm(s),
        "global_memory_buffer": workspace.global_memory_buffer(s, row),
        "dummy_weight_gradients": workspace.dummy_weight_gradients(s, row, set(kinds)),
    }
    if s.plan.lora is not None:
        buffers["lora_regather_buffers"] = lora.regather_buffers(s)
    static |= buffers
    dynamic = _dynamic(s, rank, stages)
    steady = sum(static.values()) + workspace.stage_input(s, row)
    peak = sum(static.values()) + sum(dynamic.values())
    if steady > peak:
        dynamic["stage_inputs"] = steady - peak
        peak = steady
    static_bytes, dynamic_bytes = sum(static.values()), sum(dynamic.values())
    dummies = buffers["dummy_weight_gradients"]
    low = int(STATIC_BOUNDS[0] * (static_bytes - dummies) + DYNAMIC_BOUNDS[0] * dynamic_bytes)
    dynamic_high = MOE_DYNAMIC_HIGH if s.moe is not None else DYNAMIC_BOUNDS[1]
    high = int(STATIC_BOUNDS[1] * static_bytes + dynamic_high * dynamic_bytes) + UNCOUNTED_BYTES
    if widened:
        low, high = int(UNMODELLED_BOUNDS[0] * low), int(UNMODELLED_BOUNDS[1] * high)
    context, nccl = device.context(s), device.nccl(s)
    fragmentation = device.fragmentation(s, peak, high)
    outside = context + nccl + fragmentation
    components = static | dynamic
    components |= {
        "cuda_context": context.likely,
        "nccl": nccl.likely,
        "fragmentation": fragmentation.likely,
    }
    return RankEstimate(
        pipeline_rank=rank,
        parameters=total_parameters,
        steady_bytes=steady,
        peak_first_step_bytes=max(steady, peak - first_step),
        peak_bytes=peak,
        peak_low_bytes=low,
        peak_high_bytes=high,
        device_bytes=peak + outside.likely,
        device_low_bytes=low + outside.low,
        device_high_bytes=high + outside.high,
        components={name: size for name, size in components.items() if size},
    )


def _state(s: Sizes, counts: parameters.Counts, num_layers: int) -> tuple[dict[str, int], int, int]:
    """State by component, the part that appears with the first optimizer step, parameters."""
    frozen = parameters.Counts()
    if s.plan.lora is not None:
        frozen, counts = counts, parameters.Counts(lora.parameters(s, num_layers))
    dense = state.bytes_per_parameter(s)
    parts = {
        "frozen_weights": s.element * frozen.total,
        "weights": dense.weights(counts.dense),
        "gradients": dense.gradients(counts.dense),
        "optimizer_state": dense.optimizer(counts.dense),
        "gradient_copies": dense.copies(counts.dense),
    }
    first_step = dense.first_step(counts.dense)
    if counts.expert:
        expert = state.bytes_per_parameter(s, expert=True)
        parts |= {
            "expert_weights": expert.weights(counts.expert),
            "expert_gradients": expert.gradients(counts.expert),
            "expert_optimizer_state": expert.optimizer(counts.expert),
        }
        parts["gradient_copies"] += expert.copies(counts.expert)
        first_step += expert.first_step(counts.expert)
    return parts, first_step, counts.total + frozen.total


def _dynamic(s: Sizes, rank: int, stages: Sequence[Stage]) -> dict[str, int]:
    """Activations and loss tail at the rank's worst moment, by component.

    Recompute brings one checkpoint back at a time, after the loss tail is gone: the larger of
    the two counts.
    """
    plan = s.plan
    recomputed = max(stage.activations.recomputed for stage in stages)
    group = plan.microbatch_group_size or plan.pp
    moments = schedule.moments(
        plan.pp,
        rank,
        len(stages),
        group,
        s.microbatches,
        plan.overlap_moe_expert_parallel_comm,
    )
    tail = loss.tail(s)
    totals = [stage.activations.total for stage in stages]
    tail_bytes = sum(tail.values())

    def size(moment: schedule.Moment) -> int:
        held = sum(map(int.__mul__, moment.held, totals))
        return held + max(tail_bytes if stages[moment.forwarded].chunk.loss else 0, recomputed)

    worst = max(moments, key=size)
    parts: dict[str, int] = {}
    for held, stage in zip(worst.held, stages, strict=True):
        for name, each in stage.activations.kept.items():
            parts[name] = parts.get(name, 0) + held * each
    if stages[worst.forwarded].chunk.loss and tail_bytes >= recomputed:
        parts |= tail
    elif recomputed:
        parts["recomputed_layers"] = recomputed
    return parts
