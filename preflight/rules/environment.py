"""Environment variables that PyTorch, NCCL and Megatron refuse or ignore.

Only the user's own settings are judged (`env:`, exports of `setup:`, `cluster.env`): what the
computed block sets agrees with the job by construction.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtlaunch.preflight import alloc_conf
from mtlaunch.preflight.environment import (
    LAYER_WORDS,
    allocator_value,
    expandable_segments_on,
    own_allocator_setting,
    own_setting,
    policy_block,
)
from mtlaunch.preflight.plan import Plan, show_version
from mtlaunch.preflight.rule import Finding, rule

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
NAMES = (alloc_conf.NAME, alloc_conf.NEW_NAME)


def _expandable_source(plan: Plan) -> tuple[str, str, str] | None:
    """Where the expandable_segments option that counts comes from: (name, value, layer)."""
    for name in NAMES:  # the older name wins over the newer one
        own = own_setting(plan, name)
        if own is not None and alloc_conf.EXPANDABLE in alloc_conf.options(own[0]):
            return name, own[0], own[1]
    return None


@rule(
    "ENV001",
    "nccl-user-buffers-with-expandable-segments",
    "error",
    "megatron/core/distributed/distributed_data_parallel_config.py __post_init__ (0.16.1, 0.19.2); "
    "NVIDIA skill nemo-mbridge-perf-memory-tuning",
)
def user_buffers_with_expandable_segments(plan: Plan) -> Iterator[Finding]:
    """NCCL user buffers are asked for, and an own allocator setting turns expandable segments on.

    What it checks
        With use-nccl-ub (Megatron-Bridge: ddp.nccl_ub) no setting of PYTORCH_CUDA_ALLOC_CONF or
        PYTORCH_ALLOC_CONF, in env:, setup: or cluster.env, has expandable_segments:True, at any
        position of the list. mtlaunch's own block leaves the option out with user buffers.
        An error with megatron-core before 0.18, with torch before 2.11, and when cluster.torch is
        not given; a warning with both newer.

    Why it fails
        User buffers are registered through torch.cuda.MemPool, which cannot hold expandable
        segments: ValueError in DistributedDataParallelConfig. Where the guard does not see the
        setting (the newer name, blanks in the list) registration fails at run time instead.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          use-distributed-optimizer: true
          use-nccl-ub: true
        env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          use-distributed-optimizer: true
          use-nccl-ub: true

    Stays silent
        Without an own setting, and for expandable_segments:False.
    """
    source = _expandable_source(plan)
    if not plan.nccl_ub or source is None or not expandable_segments_on(plan):
        return
    name, value, layer = source
    flag = plan.spelling("use-nccl-ub")
    core_old, torch_old = plan.core_before(0, 18), plan.torch_before(2, 11)
    allowed = not core_old and torch_old is False
    seen = f"{LAYER_WORDS[layer]} sets {name}={value}, and {flag} registers NCCL user buffers"
    drop = f"take {alloc_conf.EXPANDABLE_ON} out of {name} in {LAYER_WORDS[layer]}"
    if allowed:
        yield Finding(
            f"env.{name}",
            f"{seen}: megatron-core {show_version(plan.megatron_core)} lets expandable segments "
            f"pass from torch 2.11 on, NVIDIA's guide still says never",
            f"{drop} (mtlaunch's own setting leaves it out with user buffers), or drop {flag}",
            severity="warning",
        )
        return
    torch = show_version(plan.torch) if plan.torch else "not given, which counts as older"
    fix = f"{drop} (mtlaunch's own setting leaves it out with user buffers), or drop {flag}"
    if torch_old is None and not core_old:
        fix += "; if it runs torch 2.11 or newer, say so: cluster.torch"
    yield Finding(
        f"env.{name}",
        f"{seen}, which expandable segments cannot hold: Megatron refuses the two before "
        f"megatron-core 0.18 (here {show_version(plan.megatron_core)}) and before torch 2.11 "
        f"(here {torch})",
        fix,
    )


@rule(
    "ENV002",
    "expandable-segments-value",
    "error",
    "c10/core/AllocatorConfig.h ConfigTokenizer::toBool (torch 2.13)",
)
def expandable_segments_value(plan: Plan) -> Iterator[Finding]:
    """PyTorch cannot read the value of expandable_segments.

    What it checks
        expandable_segments in PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is True or False,
        spelled like this, wherever it stands in the list: PyTorch parses all, though the last one
        counts.

    Why it fails
        ValueError when the allocator reads its settings, on every rank: "Expected 'True' or
        'False'". Megatron's guards do not see such a value, so they say nothing.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:true"}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}

    Stays silent
        When a stronger setting replaces the value, and for blanks, which PyTorch drops.
    """
    source = _expandable_source(plan)
    if source is None:
        return
    name, value, layer = source
    wrong = alloc_conf.rejected(value)
    if wrong is None:
        return
    meant = "False" if wrong.lower() in ("false", "0", "off", "no") else "True"
    shown = f"{alloc_conf.EXPANDABLE}:{wrong}" if wrong else f"{alloc_conf.EXPANDABLE} (no value)"
    yield Finding(
        f"env.{name}",
        f"{shown} in {LAYER_WORDS[layer]}: PyTorch reads True or False, nothing else",
        f"write {alloc_conf.EXPANDABLE}:{meant}",
    )


@rule(
    "ENV003",
    "allocator-setting-under-new-name",
    "warning",
    "torch c10 allocator config (headers of 2.9.1, 2.10.0 and 2.11.0; 2.13 run)",
)
def allocator_new_name(plan: Plan) -> Iterator[Finding]:
    """PYTORCH_ALLOC_CONF is set where PyTorch would not read it.

    What it checks
        PYTORCH_ALLOC_CONF is not set beside PYTORCH_CUDA_ALLOC_CONF, nor alone with torch before
        2.10.

    Why it fails
        It does not fail: before 2.10 the CUDA allocator reads PYTORCH_CUDA_ALLOC_CONF only; from
        2.10 on that name wins whenever it is set, even empty. The options under the new name do
        nothing, and no Megatron guard looks at them. mtlaunch merges them into the other name.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {torch: "2.9"}
        entrypoint: train.py
        env: {PYTORCH_ALLOC_CONF: "max_split_size_mb:512"}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {torch: "2.9"}
        entrypoint: train.py
        env: {PYTORCH_CUDA_ALLOC_CONF: "max_split_size_mb:512,expandable_segments:True"}

    Stays silent
        With the new name alone when torch is 2.10 or newer, or not given.
    """
    new = own_setting(plan, alloc_conf.NEW_NAME)
    if new is None:
        return
    both = own_setting(plan, alloc_conf.NAME) is not None
    if both:
        why = f"{alloc_conf.NAME} is set too, and wins in PyTorch"
    elif plan.torch is not None and plan.torch_before(2, 10):
        why = f"torch {show_version(plan.torch)} reads {alloc_conf.NAME} only"
    else:
        return
    yield Finding(
        f"env.{alloc_conf.NEW_NAME}",
        f"{alloc_conf.NEW_NAME}={new[0]} in {LAYER_WORDS[new[1]]}: {why}; the options were merged "
        f"into {alloc_conf.NAME}={allocator_value(plan)}",
        f"write all options under {alloc_conf.NAME}",
    )


@rule(
    "ENV004",
    "cuda-device-max-connections",
    "error",
    "megatron/training/arguments.py validate_args (0.16.1, 0.19.2); Megatron-Bridge "
    "src/megatron/bridge/training/config.py",
)
def max_connections(plan: Plan) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS is set against what Megatron asserts.

    What it checks
        With Megatron-FSDP or torch FSDP2 an own CUDA_DEVICE_MAX_CONNECTIONS is not 1. Under
        Megatron-LM with TP or CP above 1 on a GPU of compute capability below 10 (Hopper and
        older) it is 1, unless FSDP or the overlap of expert-parallel communication is on.

    Why it fails
        AssertionError in validate_args. With TP or CP one hardware queue keeps communication
        before the GEMM that it overlaps with; FSDP wants several.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: H100-80GB}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          tensor-model-parallel-size: 2
        env: {CUDA_DEVICE_MAX_CONNECTIONS: "32"}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        cluster: {gpu: H100-80GB}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          tensor-model-parallel-size: 2
        env: {CUDA_DEVICE_MAX_CONNECTIONS: "1"}

    Stays silent
        Without an own setting (mtlaunch computes it), on Blackwell, when the GPU is not known,
        and, for the TP and CP part, under Megatron-Bridge, which does not check it.
    """
    own = own_setting(plan, CONNECTIONS)
    if own is None:
        return
    value, layer = own
    seen = f"{CONNECTIONS}={value} in {LAYER_WORDS[layer]}"
    if plan.megatron_fsdp or plan.torch_fsdp2:
        option = "use-megatron-fsdp" if plan.megatron_fsdp else "use-torch-fsdp2"
        if value == "1":
            yield Finding(
                f"env.{CONNECTIONS}",
                f"{seen}: {plan.spelling(option)} needs more than 1",
                "leave it out: mtlaunch sets it",
            )
        return
    if plan.is_bridge or plan.overlap_moe_expert_parallel_comm or value == "1":
        return
    if plan.gpu is None or plan.gpu.blackwell or (plan.tp == 1 and plan.cp == 1):
        return
    sizes = " and ".join(
        f"{name} {size}" for name, size in (("TP", plan.tp), ("CP", plan.cp)) if size > 1
    )
    yield Finding(
        f"env.{CONNECTIONS}",
        f"{seen}: {sizes} on {plan.gpu.name} (before Blackwell) needs 1",
        "set it to 1, or leave it out: mtlaunch sets it",
    )


@rule(
    "ENV005",
    "expandable-segments-off",
    "info",
    "NVIDIA skill nemo-mbridge-perf-memory-tuning",
)
def expandable_segments_off(plan: Plan) -> Iterator[Finding]:
    """An own allocator setting leaves expandable segments off.

    What it checks
        An own PYTORCH_CUDA_ALLOC_CONF replaces mtlaunch's; it has expandable_segments:True.

    Why it fails
        It need not fail. Without expandable segments one rank can run out of memory from
        fragmentation while others have gigabytes free: 58.8 GB allocated on an 80 GB GPU was
        enough in a measured Llama3 70B run. Switching them on cost nothing there.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        env: {PYTORCH_CUDA_ALLOC_CONF: "max_split_size_mb:512"}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        env: {PYTORCH_CUDA_ALLOC_CONF: "max_split_size_mb:512,expandable_segments:True"}

    Stays silent
        With NCCL user buffers, which rule them out, with a colocated inference engine (facts:),
        whose memory pools may, and without an own setting.
    """
    own = own_allocator_setting(plan)
    if own is None or plan.nccl_ub or expandable_segments_on(plan) or plan.facts.get("colocated"):
        return
    value, layer, name = own
    if alloc_conf.rejected(value) is not None:
        return
    replaced = alloc_conf.options(value) | {alloc_conf.EXPANDABLE: "True"}
    yield Finding(
        f"env.{name}",
        f"{name}={value} in {LAYER_WORDS[layer]} leaves expandable segments off, which avoid "
        "out-of-memory from fragmentation at no cost",
        f"{name}={alloc_conf.text(replaced)}",
    )


@rule(
    "ENV006",
    "setup-export-replaced",
    "warning",
    "mtlaunch's job script: the environment block comes after setup:",
)
def setup_export_replaced(plan: Plan) -> Iterator[Finding]:
    """setup: computes a variable that mtlaunch's block sets or unsets after it.

    What it checks
        Variables of the environment block that setup: exports have a value that can be read
        without running a shell: no $, no backquotes, no +=.

    Why it fails
        It does not fail: mtlaunch takes over what it can read. Another value is not known to the
        checks, and the block, which comes after setup:, replaces it by mtlaunch's own.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        setup: ["export NCCL_ALGO=$SITE_ALGO"]

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        setup: ["export NCCL_ALGO=Ring"]

    Stays silent
        For variables that env: sets as well, and for those that mtlaunch has no opinion on.
    """
    replaced = [name for name in plan.setup_unread if name not in plan.env]
    if not replaced:
        return
    for variable in policy_block(plan):
        if variable.name not in replaced:
            continue
        done = "unsets it" if variable.value is None else f"sets {variable.value or '(empty)'}"
        yield Finding(
            f"env.{variable.name}",
            f"setup exports {variable.name} with a value that the shell computes; mtlaunch's "
            f"block comes after it and {done} ({variable.reason})",
            f"write the value itself, in setup or under env: env: {{{variable.name}: ...}}",
            where=plan.place(f"setup.{variable.name}"),
        )
