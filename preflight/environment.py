"""The environment block: a policy table computed from the Plan.

Each variable of the table has a value or none, a reason and a source. Layers, later wins:
default < GPU type < site (`cluster.env`) < job (`setup:` exports, then `env:`). The script unsets
every variable of the table that it does not set, so that the submit shell cannot bring one back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtlaunch.preflight import alloc_conf
from mtlaunch.preflight.plan import Plan

RECIPES = "Megatron-Bridge perf_recipes (067f987df03b), env_vars"
FOUNDING = "NVIDIA skill nemo-mbridge-perf-memory-tuning"

# where a user's own setting stands in the job file, by layer
LAYER_WORDS = {"job": "env", "setup": "setup", "site": "cluster.env"}


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the block. `value` None: the script unsets it."""

    name: str
    value: str | None
    reason: str
    source: str = ""
    layer: str = "default"  # default, gpu, site, setup, job
    computed: str | None = None  # what the table would have set, when a later layer won


@dataclass(frozen=True, slots=True)
class Computed:
    """What the policy says: a value or none, with its reason."""

    value: str | None
    reason: str
    source: str
    layer: str = "default"


Policy = Callable[[Plan], Computed]
_POLICIES: dict[str, Policy] = {}


def _policy(name: str) -> Callable[[Policy], Policy]:
    def register(policy: Policy) -> Policy:
        _POLICIES[name] = policy
        return policy

    return register


@_policy(alloc_conf.NAME)
def _allocator(plan: Plan) -> Computed:
    if plan.nccl_ub:
        reason = (
            "left out: NCCL user buffers cannot be registered on expandable segments "
            "(megatron-core refuses the pair before 0.18 or with torch before 2.11)"
        )
        source = "megatron/core/distributed/distributed_data_parallel_config.py"
        return Computed(None, reason, source)
    reason = "expandable segments avoid the fragmentation behind most OOMs at the limit, at no cost"
    return Computed(alloc_conf.EXPANDABLE_ON, reason, FOUNDING)


@_policy(alloc_conf.NEW_NAME)
def _new_allocator_name(plan: Plan) -> Computed:
    reason = f"one name only: {alloc_conf.NAME} is what every torch and every Megatron guard reads"
    return Computed(None, reason, "torch c10 allocator config, 2.9 to 2.14")


@_policy("NCCL_GRAPH_REGISTER")
def _graph_register(plan: Plan) -> Computed:
    source = "megatron/core/transformer/cuda_graphs.py CudaGraphManager, TECudaGraphHelper"
    if expandable_segments_on(plan):
        reason = (
            "CUDA graphs that capture collectives on expandable segments end in an illegal memory "
            "access unless NCCL's graph registration is off"
        )
        return Computed("0", reason, source)
    return Computed(None, "needed only with expandable segments, which are off here", source)


@_policy("CUDA_DEVICE_MAX_CONNECTIONS")
def _max_connections(plan: Plan) -> Computed:
    source = "megatron/training/arguments.py validate_args; " + RECIPES
    many = "32" if plan.moe_dispatcher_backend in ("deepep", "hybridep") else "8"
    if plan.megatron_fsdp or plan.torch_fsdp2:
        return Computed(many, "FSDP overlaps on several hardware queues and refuses 1", source)
    if plan.overlap_moe_expert_parallel_comm:
        reason = "expert-parallel all-to-all overlap needs several hardware queues"
        return Computed("32" if _blackwell(plan) else many, reason, source)
    if _blackwell(plan):
        reason = "Blackwell has no ordering limit; tuned recipes use 32"
        return Computed("32", reason, source, "gpu")
    if plan.tp > 1 or plan.cp > 1:
        reason = (
            "TP or CP above 1 on Hopper and older: one hardware queue puts communication before "
            "the GEMM it overlaps with; Megatron asserts it"
        )
        return Computed("1", reason, source, "gpu" if plan.gpu else "default")
    if plan.moe_dispatcher_backend in ("deepep", "hybridep"):
        return Computed("32", "DeepEP and HybridEP want many hardware queues", source)
    return Computed(None, "TP and CP are 1: CUDA's own default is right", source)


def _blackwell(plan: Plan) -> bool:
    return plan.gpu is not None and plan.gpu.blackwell


@_policy("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
def _nondeterministic(plan: Plan) -> Computed:
    if plan.deterministic_mode:
        reason = "--deterministic-mode: Transformer Engine refuses to build attention otherwise"
        return Computed("0", reason, "megatron/core/extensions/transformer_engine.py")
    return Computed("1", "lets attention take its fastest backward", FOUNDING)


@_policy("TORCH_NCCL_AVOID_RECORD_STREAMS")
def _record_streams(plan: Plan) -> Computed:
    # https://github.com/pytorch/pytorch/pull/148590, first released in 2.8: always on, variable
    # deprecated; https://github.com/NVIDIA/Megatron-LM/issues/1586: wrong loss in one container.
    source = "ProcessGroupNCCL.cpp of torch 2.7 and 2.8"
    if plan.torch_before(2, 8):
        return Computed("1", "frees the buffers of finished collectives at once", source)
    return Computed(None, "torch 2.8 and newer always do so and warn about the variable", source)


@_policy("NCCL_NVLS_ENABLE")
def _nvls(plan: Plan) -> Computed:
    source = "megatron/core/nccl_allocator.py; " + RECIPES
    if plan.nccl_ub:
        return Computed("1", "NCCL user buffers are there for NVLS", source)
    if plan.use_sharp:
        return Computed(None, "--use-sharp: left to NCCL", source)
    return Computed("0", "NVLS buffers cost GPU memory and nothing here uses them", source)


@_policy("NCCL_CTA_POLICY")
def _cta_policy(plan: Plan) -> Computed:
    if plan.nccl_ub:
        return Computed("1", "NCCL's efficiency policy, as tuned with user buffers", RECIPES)
    return Computed(None, "only with NCCL user buffers", RECIPES)


@_policy("NVTE_CPU_OFFLOAD_V1")
def _offload_v1(plan: Plan) -> Computed:
    source = "megatron/training/arguments.py validate_args"
    if plan.fine_grained_activation_offloading:
        reason = "fine-grained activation offloading: without it TE 2.10 would offload weights too"
        return Computed("1", reason, source)
    return Computed(None, "only with fine-grained activation offloading", source)


@_policy("NCCL_ALGO")
def _nccl_algo(plan: Plan) -> Computed:
    source = "megatron/training/determinism.py"
    if plan.deterministic_mode:
        return Computed("Ring", "--deterministic-mode wants a fixed reduction order", source)
    return Computed(None, "NCCL chooses", source)


@_policy("CUBLAS_WORKSPACE_CONFIG")
def _cublas(plan: Plan) -> Computed:
    source = "megatron/training/determinism.py"
    if plan.deterministic_mode:
        return Computed(":4096:8", "--deterministic-mode wants fixed cuBLAS workspaces", source)
    return Computed(None, "only in deterministic mode", source)


POLICY_NAMES = tuple(_POLICIES)


def own_setting(plan: Plan, name: str) -> tuple[str, str] | None:
    """The user's own value and its layer, the strongest one: job, setup, site."""
    for layer, mapping in (("job", plan.env), ("setup", plan.setup_env), ("site", plan.site_env)):
        if name in mapping:
            return mapping[name], layer
    return None


def own_allocator_setting(plan: Plan) -> tuple[str, str, str] | None:
    """The user's allocator options under both names: (value, layer, name that counts).

    torch 2.10 and newer read PYTORCH_CUDA_ALLOC_CONF first, even when it is empty, and the other
    name only without it; older torch reads the CUDA name alone. So the CUDA name's options win,
    and those of the new name fill in.
    """
    own, new = own_setting(plan, alloc_conf.NAME), own_setting(plan, alloc_conf.NEW_NAME)
    if own is None and new is None:
        return None
    if new is None:
        assert own is not None
        return own[0], own[1], alloc_conf.NAME
    if own is None:
        return new[0], new[1], alloc_conf.NEW_NAME
    merged = alloc_conf.options(new[0]) | alloc_conf.options(own[0])
    return alloc_conf.text(merged), own[1], alloc_conf.NAME


def allocator_value(plan: Plan) -> str | None:
    """The PYTORCH_CUDA_ALLOC_CONF that the ranks will get."""
    computed = _allocator(plan).value
    own = own_allocator_setting(plan)
    if own is None:
        return computed
    value, _, name = own
    if name == alloc_conf.NAME:
        return value
    # only the new name was set: its options on top of what the block sets anyway
    base = alloc_conf.options(computed) if computed else {}
    return alloc_conf.text(base | alloc_conf.options(value))


def expandable_segments_on(plan: Plan) -> bool:
    return alloc_conf.expandable(allocator_value(plan) or "")


def policy_block(plan: Plan) -> list[Variable]:
    """The table's variables, set or unset, each with its reason."""
    block = []
    for name, policy in _POLICIES.items():
        computed = policy(plan)
        own = own_setting(plan, name)
        if name == alloc_conf.NAME:
            block.append(_allocator_variable(plan, computed))
        elif name == alloc_conf.NEW_NAME and own is not None:
            reason = f"merged into {alloc_conf.NAME}: {computed.reason}"
            block.append(Variable(name, None, reason, computed.source, own[1], None))
        elif own is not None:
            reason = f"set by {LAYER_WORDS[own[1]]}"
            if own[0] != computed.value:
                shown = "leave it unset" if computed.value is None else f"set {computed.value}"
                reason += f"; mtlaunch would {shown}: {computed.reason}"
            source = computed.source
            block.append(Variable(name, own[0], reason, source, own[1], computed.value))
        else:
            reason, source = computed.reason, computed.source
            block.append(Variable(name, computed.value, reason, source, computed.layer))
    return block


def _allocator_variable(plan: Plan, computed: Computed) -> Variable:
    own = own_allocator_setting(plan)
    value = allocator_value(plan)
    if own is None:
        reason, source = computed.reason, computed.source
        return Variable(alloc_conf.NAME, value, reason, source, computed.layer)
    _, layer, name = own
    reason = f"set by {LAYER_WORDS[layer]}"
    if name == alloc_conf.NEW_NAME or own_setting(plan, alloc_conf.NEW_NAME):
        reason += f", {alloc_conf.NEW_NAME} merged into it"
    if value != computed.value:
        reason += f"; {computed.reason}"
    return Variable(alloc_conf.NAME, value, reason, computed.source, layer, computed.value)


def own_block(plan: Plan) -> list[Variable]:
    """Variables of site and job that are not in the table, site first, the job's value winning.

    What `setup:` exports has been set by then, and stays as it is.
    """
    exported = {*plan.setup_env, *plan.setup_unread}  # setup: is the job's, and runs before
    site = {name: value for name, value in plan.site_env.items() if name not in exported}
    merged: dict[str, tuple[str, str]] = {}
    for layer, mapping in (("site", site), ("job", plan.env)):
        for name, value in mapping.items():
            merged[name] = (value, layer)
    return [
        Variable(name, value, f"set by {LAYER_WORDS[layer]}", "", layer)
        for name, (value, layer) in merged.items()
        if name not in _POLICIES
    ]


def block(plan: Plan) -> list[Variable]:
    """The whole environment block, policy first."""
    return policy_block(plan) + own_block(plan)
