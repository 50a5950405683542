"""Plan: the one frozen, fully resolved description of a launch.

Rules, estimator, environment policy and renderer read a Plan and nothing else. Megatron's own
defaulting has been applied (see `resolve`), and every option knows where it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtlaunch.preflight import flags
from mtlaunch.preflight.gpus import Gpu
from mtlaunch.preflight.slurm_time import warning_before_s
from mtlaunch.preflight.yaml_text import Place

Version = tuple[int, ...]

# Beyond the checkpoint itself: a signal can come up to 60 s early (man sbatch, --signal), and the
# ranks need a step to notice it.
SIGNAL_MARGIN_S = 60

# Whose rules apply when the cluster profile names no version.
NEWEST_MEGATRON_CORE: Version = (0, 19)


def parse_version(text: str) -> Version:
    """Leading numbers of a version: "2.11.0a0+eb65b36914" is (2, 11, 0).

    >>> parse_version("0.16.1"), parse_version("2.12.0a0+0291f960b6")
    ((0, 16, 1), (2, 12, 0))
    """
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = ""
        for char in part:
            if not char.isdigit():
                break
            digits += char
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def show_version(version: Version) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """LoRA as the job file asks for it; `sequence_parallel` is base, regather or gather-free."""

    dim: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...]
    sequence_parallel: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, resolved. `None` means: not given, and Megatron has no default that decides it.

    Sizes are counts; `seq_length` and `padded_vocab_size` in tokens; `micro_batch_size` and
    `global_batch_size` in samples. `args` holds every option under its canonical flag, as typed
    values, for what has no field of its own.
    """

    # what is launched
    name: str = "job"
    file: str = "job.yaml"
    framework: str = "megatron-lm"  # or megatron-bridge
    launcher: str = "srun"  # or torchrun
    entrypoint: str | None = None
    entrypoint_is_module: bool = False
    python: str | None = None
    workdir: str | None = None
    setup: tuple[str, ...] = ()
    command_args: tuple[str, ...] = ()  # the script's argument list, as it will be typed
    secrets: tuple[str, ...] = ()
    container: Mapping[str, Any] | None = None
    slurm: Mapping[str, str | bool] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  # `env:` of the job file
    setup_env: Mapping[str, str] = field(default_factory=dict)  # exports read out of `setup:`
    setup_unread: tuple[str, ...] = ()  # exports of `setup:` whose value the shell computes
    site_env: Mapping[str, str] = field(default_factory=dict)  # `cluster.env`
    facts: Mapping[str, Any] = field(default_factory=dict)

    # the machine
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int | None = None  # None: the job asks Slurm for no GPU
    gpu_name: str | None = None
    gpu: Gpu | None = None  # None: not named, or not in the table
    node_ram_gb: float | None = None
    megatron_core: Version = NEWEST_MEGATRON_CORE
    torch: Version | None = None
    transformer_engine: Version | None = None
    slurm_version: Version | None = None

    # parallel layout
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1  # expert tensor parallel: TP when not given
    vpp: int | None = None  # virtual stages on a pipeline rank; None: no interleaving
    vpp_option: str | None = None  # which of Megatron's ways asked for it
    layers_per_virtual_stage: int | None = None
    layout: str | None = None  # pipeline-model-parallel-layout, as text
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    microbatch_group_size: int | None = None
    sequence_parallel: bool = False

    # the model
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    swiglu: bool = False
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    bias_linear: bool = True
    qkv_bias: bool = False
    untied_embeddings: bool = False
    learned_positions: bool = True
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    num_experts: int | None = None
    mtp_num_layers: int | None = None

    # batch
    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None

    # training
    bf16: bool = False
    fp16: bool = False
    fp8: str | None = None
    fp4: str | None = None
    distributed_optimizer: bool = False
    optimizer: str = "adam"
    grad_reduce_in_bf16: bool = False
    precision_aware_optimizer: bool = False
    gradient_accumulation_fusion: bool = True
    megatron_fsdp: bool = False
    torch_fsdp2: bool = False
    nccl_ub: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    cpu_offloading: bool = False  # of activations and weights, layer by layer
    cpu_offloading_num_layers: int = 0
    fine_grained_activation_offloading: bool = False
    optimizer_cpu_offload: bool = False
    cuda_graph_impl: str = "none"  # local | transformer_engine | full_iteration
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "auto"
    cross_entropy_fusion: bool = False
    cross_entropy_impl: str = "native"
    overlap_moe_expert_parallel_comm: bool = False
    moe_dispatcher_backend: str | None = None  # deepep | hybridep
    deterministic_mode: bool = False
    use_sharp: bool = False
    lora: LoraSettings | None = None

    args: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def model_parallel_size(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int | None:
        """Data-parallel size, or None where the world does not divide (a rule reports that)."""
        if self.world_size % self.model_parallel_size:
            return None
        return self.world_size // self.model_parallel_size

    @property
    def edp(self) -> int | None:
        """Data-parallel size of the experts."""
        grid = self.etp * self.ep * self.pp
        return None if self.world_size % grid else self.world_size // grid

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches a step; without a global batch Megatron takes micro batch times DP.

        With decrease-batch-size-if-needed Megatron rounds the global batch down.
        """
        if self.dp is None or self.micro_batch_size is None:
            return None
        if self.global_batch_size is None:
            return 1
        step = self.micro_batch_size * self.dp
        if self.global_batch_size % step and not self.args.get("decrease-batch-size-if-needed"):
            return None
        return self.global_batch_size // step or None

    @property
    def shape_known(self) -> bool:
        """Whether the model's dimensions are enough for an estimate."""
        return None not in (
            self.num_layers,
            self.hidden_size,
            self.num_attention_heads,
            self.padded_vocab_size,
            self.seq_length,
            self.micro_batch_size,
        )

    @property
    def is_bridge(self) -> bool:
        return self.framework == "megatron-bridge"

    @property
    def warning_before_limit_s(self) -> int | None:
        """Seconds before the time limit at which the script is warned; None without a warning."""
        if "signal" in self.slurm:
            return warning_before_s(str(self.slurm["signal"]))
        if "checkpoint_seconds" in self.facts:
            return int(self.facts["checkpoint_seconds"]) + SIGNAL_MARGIN_S
        return None

    def core_before(self, *version: int) -> bool:
        return self.megatron_core[: len(version)] < version

    def torch_before(self, *version: int) -> bool | None:
        """None when the torch version is not known."""
        return None if self.torch is None else self.torch[: len(version)] < version

    def place(self, option: str) -> Place:
        """Where an option was written; the file itself for defaults."""
        return self.places.get(option, Place(self.file))

    def spelling(self, option: str) -> str:
        """The option as the user wrote it, else as the framework's own: flag or config field."""
        default = flags.field(option) if self.is_bridge else f"--{option}"
        return self.spellings.get(option, default)
