"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from mtlaunch.preflight.environment import LAYER_WORDS, expandable_segments_on, own_setting
from mtlaunch.preflight.flags import CUDA_GRAPH_ALIASES
from mtlaunch.preflight.hints import assign
from mtlaunch.preflight.plan import Plan, show_version
from mtlaunch.preflight.rule import Finding, rule

REGISTER = "NCCL_GRAPH_REGISTER"


def full_iteration(plan: Plan) -> bool:
    """Whether one graph holds the whole step: a scope of local graphs before 0.19, then an impl."""
    scope = plan.args.get("cuda-graph-scope") or ()
    scopes = scope if isinstance(scope, list) else str(scope).replace(",", " ").split()
    return plan.cuda_graph_impl == "full_iteration" or "full_iteration" in scopes


def asserts_register(plan: Plan) -> bool:
    """Whether Megatron refuses to start without NCCL_GRAPH_REGISTER=0 on expandable segments.

    False where that is not known. CudaGraphManager, which guards local graphs, is not built for
    one graph of the whole step.
    """
    if plan.cuda_graph_impl == "transformer_engine":
        return True
    if plan.cuda_graph_impl != "local" or full_iteration(plan):
        return False
    return plan.core_before(0, 19) and plan.gpu is not None and not plan.gpu.blackwell


def asked_for(plan: Plan) -> str:
    """The option that asks for graphs, as the user wrote it."""
    for name, impl in CUDA_GRAPH_ALIASES.items():
        # a value that is no truth has been refused, and beside another impl Megatron asserts
        if impl == plan.cuda_graph_impl and plan.args.get(name):
            return assign(plan, name)
    return assign(plan, "cuda-graph-impl", plan.cuda_graph_impl)


@rule(
    "GRF001",
    "graph-register-with-expandable-segments",
    "error",
    "megatron/core/transformer/cuda_graphs.py CudaGraphManager (0.16.1), TECudaGraphHelper "
    "(0.16.1, 0.19.2); megatron/training/arguments.py validate_args",
)
def graph_register(plan: Plan) -> Iterator[Finding]:
    """CUDA graphs on expandable segments, and NCCL_GRAPH_REGISTER is not 0.

    What it checks
        With CUDA graphs and expandable segments on, an own NCCL_GRAPH_REGISTER is 0, which is what
        mtlaunch sets. An error with Transformer Engine graphs on every GPU, and with local graphs
        below compute capability 10 up to megatron-core 0.18; otherwise a warning: Megatron does
        not guard it there, or the GPU that decides it is not known.

    Why it fails
        AssertionError in validate_args and TECudaGraphHelper, or in CudaGraphManager. Unguarded,
        NCCL registers the buffers of captured collectives, and replay ends in an illegal memory
        access.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          cuda-graph-impl: transformer_engine
        env: {NCCL_GRAPH_REGISTER: "1"}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          cuda-graph-impl: transformer_engine
        env: {NCCL_GRAPH_REGISTER: "0"}

    Stays silent
        Without CUDA graphs, without an own NCCL_GRAPH_REGISTER, and with expandable segments off.
    """
    own = own_setting(plan, REGISTER)
    if own is None or own[0] == "0" or plan.cuda_graph_impl == "none":
        return
    if not expandable_segments_on(plan):
        return
    value, layer = own
    refused = asserts_register(plan)
    depends_on_gpu = plan.cuda_graph_impl == "local" and not full_iteration(plan)
    if plan.cuda_graph_impl == "transformer_engine":
        where = "on every GPU"
    elif refused and plan.gpu is not None:
        where = f"on {plan.gpu.name} with megatron-core {show_version(plan.megatron_core)}"
    else:
        where = ""
    if refused:
        limit = f"Megatron refuses any value but 0 {where}"
    elif depends_on_gpu and plan.core_before(0, 19) and plan.gpu is None:
        gpu = f"'{plan.gpu_name}' is not known" if plan.gpu_name else "is not given"
        limit = (
            "any value but 0 risks an illegal memory access, and Megatron refuses it before "
            f"Blackwell with megatron-core {show_version(plan.megatron_core)} (cluster.gpu {gpu})"
        )
    else:
        limit = "any value but 0 risks an illegal memory access, which Megatron does not guard here"
    yield Finding(
        f"env.{REGISTER}",
        f"{REGISTER}={value or '(empty)'} in {LAYER_WORDS[layer]} with {asked_for(plan)} and "
        f"expandable segments on: {limit}",
        f"set {REGISTER}=0, or leave it out: mtlaunch sets it",
        severity=None if refused else "warning",
    )
