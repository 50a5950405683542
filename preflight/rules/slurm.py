"""Slurm tasks and the launcher."""

from __future__ import annotations

from collections.abc import Iterator

from mtlaunch.preflight.gpus import nearest_gpus
from mtlaunch.preflight.hints import either
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule
from mtlaunch.preflight.slurm_time import time_limit_s


def _tasks_per_node(plan: Plan) -> tuple[int, str] | None:
    """Tasks a node that the job file asks for, and the option that does; `ntasks` counts them all.

    `resolve` has refused an `ntasks` that does not divide by the nodes.
    """
    for option, nodes in (("ntasks-per-node", 1), ("ntasks", plan.nodes)):
        value = str(plan.slurm.get(option, ""))
        if value.isdigit():
            return int(value) // nodes, f"slurm.{option}"
    return None


@rule(
    "SLM001",
    "tasks-differ-from-gpus",
    "error",
    "Megatron-Bridge skills/nemo-mbridge-multi-node-slurm; sbatch(1) --ntasks-per-node",
)
def tasks_differ_from_gpus(plan: Plan) -> Iterator[Finding]:
    """srun starts another number of tasks on a node than the node has GPUs.

    What it checks
        With `launcher: srun` a task is a rank: slurm.ntasks_per_node, or slurm.ntasks by nodes,
        when given, equals the GPUs a node.

    Why it fails
        Fewer tasks leave GPUs idle and the ranks wait for the missing ones; with more, two ranks
        meet on one GPU ("invalid device ordinal", NCCL "Duplicate GPU detected").

    Bad
        slurm: {nodes: 2, gpus_per_node: 8, ntasks_per_node: 1}
        launcher: srun
        entrypoint: train.py

    Good
        slurm: {nodes: 2, gpus_per_node: 8, ntasks_per_node: 8}
        launcher: srun
        entrypoint: train.py

    Stays silent
        Without ntasks_per_node (mtlaunch sets it), with `launcher: torchrun` (SLM002), and for a
        job without GPUs.
    """
    given, gpus = _tasks_per_node(plan), plan.gpus_per_node
    if plan.launcher != "srun" or given is None or gpus is None:
        return
    tasks, option = given
    if tasks == gpus:
        return
    total = option == "slurm.ntasks"
    right = f"ntasks: {gpus * plan.nodes}" if total else f"ntasks_per_node: {gpus}"
    fixes = f"use {right}, or leave it out: mtlaunch sets it"
    if total and "nodes" not in plan.slurm and tasks % gpus == 0:
        fixes = f"use nodes: {tasks // gpus}, and leave ntasks out: mtlaunch sets it"
    if tasks == 1:
        fixes += "; one task a node is launcher: torchrun"
    yield Finding(
        option,
        f"{tasks} task{'' if tasks == 1 else 's'} a node for {plan.gpus_per_node} GPUs: launcher "
        "srun runs one task a GPU",
        fixes,
    )


@rule(
    "SLM002",
    "torchrun-with-several-tasks",
    "error",
    "Megatron-Bridge skills/nemo-mbridge-multi-node-slurm",
)
def torchrun_with_several_tasks(plan: Plan) -> Iterator[Finding]:
    """torchrun is started more than once on a node.

    What it checks
        With `launcher: torchrun` slurm.ntasks_per_node, or slurm.ntasks by nodes, when given, is
        1: torchrun starts the node's ranks itself.

    Why it fails
        Every task starts a torchrun, which starts all ranks of the node: the second one ends with
        EADDRINUSE, or N x N processes share N GPUs.

    Bad
        slurm: {nodes: 2, gpus_per_node: 8, ntasks_per_node: 8}
        launcher: torchrun
        entrypoint: train.py

    Good
        slurm: {nodes: 2, gpus_per_node: 8, ntasks_per_node: 1}
        launcher: torchrun
        entrypoint: train.py

    Stays silent
        Without ntasks_per_node, and with `launcher: srun` (SLM001).
    """
    given = _tasks_per_node(plan)
    if plan.launcher != "torchrun" or given is None or given[0] == 1:
        return
    tasks, option = given
    right = f"ntasks: {plan.nodes}" if option == "slurm.ntasks" else "ntasks_per_node: 1"
    yield Finding(
        option,
        f"{tasks} tasks a node would start torchrun {tasks} times there; it must run once",
        f"use {right}, or leave it out: mtlaunch sets it; one task a GPU is launcher: srun",
    )


@rule("SLM003", "gpu-unknown", "warning", "mtlaunch's GPU table")
def gpu_unknown(plan: Plan) -> Iterator[Finding]:
    """The GPU is not in the table.

    What it checks
        cluster.gpu is a name of the GPU table (MODEL-SIZE, for example H100-80GB).

    Why it fails
        It does not fail: memory and compute capability of the GPU are not known, so `fits` is
        unknown and the rules that depend on the generation stay silent.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: H100-80G}
        entrypoint: train.py

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: H100-80GB}
        entrypoint: train.py

    Stays silent
        Without cluster.gpu.
    """
    if plan.gpu_name is None or plan.gpu is not None:
        return
    yield Finding(
        "cluster.gpu",
        f"unknown GPU '{plan.gpu_name}': whether the job fits and what its generation needs "
        "are not checked",
        f"use cluster.gpu: {either(nearest_gpus(plan.gpu_name))}",
    )


# Set for every rank by the runner, or by torchrun.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


@rule(
    "SLM004",
    "rank-variable-in-env",
    "error",
    "torch.distributed, environment variable initialization; torchrun sets the same names",
)
def rank_variable_in_env(plan: Plan) -> Iterator[Finding]:
    """A variable that differs from rank to rank is set for all of them.

    What it checks
        env and cluster.env set none of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK.

    Why it fails
        Every rank gets its own value of these. One value for all would give a group of ranks that
        all are the same one; the rank runner ends the job with exit code 78 before that.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        env: {WORLD_SIZE: 8}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py

    Stays silent
        For MASTER_ADDR and MASTER_PORT, which may be set.
    """
    for name in _RANK_VARIABLES:
        if name in plan.env or name in plan.site_env:
            value = plan.env.get(name, plan.site_env.get(name))
            yield Finding(
                f"env.{name}",
                f"{name}={value} for every rank, but each rank has its own",
                f"leave {name} out: it is set for each rank from Slurm",
            )


@rule(
    "SLM005",
    "warning-before-start",
    "error",
    "sbatch(1) --signal and --time; measured with Slurm 22.05: the signal comes up to 60 s early",
)
def warning_before_start(plan: Plan) -> Iterator[Finding]:
    """The warning before the time limit comes before the job has begun.

    What it checks
        The seconds of slurm.signal, or facts.checkpoint_seconds and 60 more, are fewer than those
        of slurm.time.

    Why it fails
        Slurm sends the signal at the start. The ranks are told to save and leave before their
        first step, or the script dies of a signal that it does not catch yet.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8, time: "00:10:00"}
        entrypoint: train.py
        facts: {checkpoint_seconds: 900}

    Good
        slurm: {nodes: 1, gpus_per_node: 8, time: "04:00:00"}
        entrypoint: train.py
        facts: {checkpoint_seconds: 900}

    Stays silent
        Without a time limit in the job file: the partition's own is not known.
    """
    limit_s = time_limit_s(str(plan.slurm.get("time", "")))
    before_s = plan.warning_before_limit_s
    if limit_s is None or before_s is None or before_s < limit_s:
        return
    cause = "slurm.signal" if "signal" in plan.slurm else "facts.checkpoint_seconds"
    yield Finding(
        "slurm.time",
        f"{plan.slurm['time']} is {limit_s:.0f} s, and {cause} wants a warning {before_s} s "
        "before the limit",
        f"more than {before_s // 60 + 1} minutes, or a shorter {cause}",
    )


@rule("SLM006", "time-unreadable", "error", "sbatch(1) --time")
def time_unreadable(plan: Plan) -> Iterator[Finding]:
    """slurm.time is not a time that sbatch reads.

    What it checks
        slurm.time and slurm.time_min are minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED.

    Why it fails
        sbatch refuses it: "Invalid --time specification".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8, time: 24h}
        entrypoint: train.py

    Good
        slurm: {nodes: 1, gpus_per_node: 8, time: "24:00:00"}
        entrypoint: train.py

    Stays silent
        Without a time limit in the job file.
    """
    for option in ("time", "time-min"):
        text = str(plan.slurm.get(option, ""))
        if text and time_limit_s(text) is None and text.upper() not in ("UNLIMITED", "INFINITE"):
            yield Finding(
                f"slurm.{option}",
                f"'{text}' is no time that sbatch reads",
                "minutes, HH:MM:SS or D-HH:MM:SS, such as 90, 04:00:00 or 1-12:00:00",
            )
