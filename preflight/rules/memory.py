"""Does the job fit on its GPUs?"""

from __future__ import annotations

from collections.abc import Iterator

from mtlaunch.preflight.environment import expandable_segments_on
from mtlaunch.preflight.memory import Estimate, estimate
from mtlaunch.preflight.memory.fixes import Fix, combined_fix, single_fixes
from mtlaunch.preflight.memory.names import describe, group_of
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule

GIB = 2**30

SOURCE = "mtlaunch.preflight.memory, which names the file of each term's allocation"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


@rule("MEM001", "does-not-fit", "error", SOURCE)
def does_not_fit(plan: Plan) -> Iterator[Finding]:
    """The memory estimate exceeds the card.

    What it checks
        The estimate of every pipeline rank: parameters, gradients, optimizer state, activations
        in flight, loss, library buffers, CUDA context and NCCL. It refuses when even the lower
        bound of a rank is above what the driver reports for the card that cluster.gpu names.

    Why it fails
        torch.OutOfMemoryError on that rank, in the first step or, where only Adam's states do not
        fit, in the first optimizer step; the other ranks then hang until the NCCL timeout.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: A100-40GB}
        entrypoint: pretrain_gpt.py
        model: llama2-7b
        args:
          bf16: true
          use-distributed-optimizer: true
          micro-batch-size: 1
          global-batch-size: 8
          seq-length: 64
          max-position-embeddings: 64

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: A100-40GB}
        entrypoint: pretrain_gpt.py
        model: llama2-7b
        args:
          tensor-model-parallel-size: 2
          sequence-parallel: true
          bf16: true
          use-distributed-optimizer: true
          micro-batch-size: 1
          global-batch-size: 8
          seq-length: 64
          max-position-embeddings: 64

    Stays silent
        Without cluster.gpu, without the model's shape, sequence length or micro-batch size, and
        wherever the job uses something that the estimate does not model (`mtlaunch estimate`
        names it): fits is "unknown" then.
    """
    result = estimate(plan)
    if result is None or result.fits != "no":
        return
    rank = max(result.ranks, key=lambda rank: rank.device_low_bytes)
    name, size = rank.largest_component()
    group, whole = group_of(name, rank.components)
    part = f"{describe(name)}, {gib(size)}"
    part += f" of {gib(whole)} {group}" if whole > size else ""
    yield Finding(
        "cluster.gpu",
        f"pipeline rank {rank.pipeline_rank} needs about {gib(rank.device_bytes)} (at least "
        f"{gib(rank.device_low_bytes)}), {result.gpu_name} has {gib(_capacity(result))}; largest "
        f"component: {part}",
        _hint(plan, name),
    )


def _capacity(result: Estimate) -> int:
    assert result.capacity_bytes is not None
    return result.capacity_bytes


def _hint(plan: Plan, largest: str) -> str:
    """The cheapest changes that make it fit by the same estimate."""
    fixes = list(single_fixes(plan))
    if largest == "attention_scores":
        # what drops the scores comes first, even where that alone is not enough
        fixes = [fix for fix in [combined_fix(plan)] if fix is not None] + fixes
    for wanted in ("yes", "tight"):
        enough = [fix for fix in fixes if fix.estimate.fits == wanted]
        if enough:
            return "use " + ", or ".join(map(_shown, enough[:2]))
    combined = combined_fix(plan)
    if combined is not None:
        return "no single change is enough; use " + _shown(combined)
    return "no change of recompute, PP or TP is enough on this many GPUs: use more, or larger ones"


def _shown(fix: Fix) -> str:
    return f"{fix.text} (about {gib(fix.estimate.worst.device_bytes)})"


@rule("MEM002", "tight-fit", "warning", SOURCE)
def tight_fit(plan: Plan) -> Iterator[Finding]:
    """The job fits by the estimate, and may still run out of memory.

    What it checks
        The upper bound of the estimate of every pipeline rank, fragmentation of PyTorch's
        allocator included, against what the driver reports for the card.

    Why it fails
        torch.OutOfMemoryError on one rank, often hours into the training: fragmentation grows and
        MoE routing drifts.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: H100-80GB}
        entrypoint: pretrain_gpt.py
        model: llama2-7b
        args:
          bf16: true
          use-distributed-optimizer: true
          micro-batch-size: 1
          global-batch-size: 8
          seq-length: 6144
          max-position-embeddings: 6144

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: H100-80GB}
        entrypoint: pretrain_gpt.py
        model: llama2-7b
        args:
          bf16: true
          use-distributed-optimizer: true
          micro-batch-size: 1
          global-batch-size: 8
          seq-length: 2048
          max-position-embeddings: 2048

    Stays silent
        As MEM001, which reports what certainly does not fit.
    """
    result = estimate(plan)
    if result is None or result.fits != "tight":
        return
    rank = max(result.ranks, key=lambda rank: rank.device_high_bytes)
    hint = ""
    if not expandable_segments_on(plan) and not plan.nccl_ub:
        hint = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or leave it to mtlaunch"
    else:
        enough = [fix for fix in single_fixes(plan) if fix.estimate.fits == "yes"]
        if enough:
            hint = "for a margin: " + ", or ".join(map(_shown, enough[:2]))
    yield Finding(
        "cluster.gpu",
        f"pipeline rank {rank.pipeline_rank} needs about {gib(rank.device_bytes)} and may need "
        f"{gib(rank.device_high_bytes)}, {result.gpu_name} has {gib(_capacity(result))}",
        hint,
    )
