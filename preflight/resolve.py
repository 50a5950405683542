"""JobFile to Plan: Megatron's own defaulting, applied once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mtlaunch.preflight import flags
from mtlaunch.preflight.gpus import find_gpu
from mtlaunch.preflight.jobfile import (
    OWNED_OPTIONS,
    SBATCH_OPTIONS,
    Cluster,
    Job,
    ModuleEntrypoint,
    UnreadJobError,
    did_you_mean,
    in_order,
    parse,
)
from mtlaunch.preflight.models import MODELS
from mtlaunch.preflight.plan import (
    NEWEST_MEGATRON_CORE,
    LoraSettings,
    Plan,
    Version,
    parse_version,
)
from mtlaunch.preflight.yaml_text import JobFileError, Path, Place, Problem

# Layout lists of Megatron-Bridge name what a layout text abbreviates.
LAYOUT_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}

# Megatron-LM: default FFN width with SwiGLU is 8/3 h, rounded down to a multiple of 64
# (megatron/training/arguments.py, validate_args).
SWIGLU_MULTIPLE = 64

# make-vocab-size-divisible-by's default (megatron/training/arguments.py)
VOCAB_MULTIPLE = 128

DEFAULT_RECOMPUTE_MODULES = ("core_attn",)


def load(text: str, file: str, assignments: Iterable[str] = ()) -> tuple[Job, Plan]:
    """A job file's text to its Plan. Raises JobFileError with every problem of both readings."""
    try:
        job = parse(text, file, assignments)
    except UnreadJobError as error:
        try:
            resolve(error.job)
        except JobFileError as more:
            raise JobFileError(in_order([*error.problems, *more.problems]), text) from error
        raise
    return job, resolve(job)


def resolve(job: Job) -> Plan:
    """The Plan of a job file. Raises JobFileError for values that no launch can be made of."""
    return _Resolver(job).plan()


@dataclass(frozen=True, slots=True)
class _Argument:
    """One entry of `args:`, a leaf where mappings are nested."""

    key: str  # as typed, dotted
    value: Any  # in the sense of the canonical flag
    path: Path
    place: Place
    target: str  # the flag or override path that is rendered
    name: str  # canonical flag; empty: passed on unread
    spelling: str  # for messages
    rank: int  # of its config section, 0 the strongest


class _Resolver:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.content = job.content
        self.document = job.document
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}
        self.spellings: dict[str, str] = {}
        self.args: dict[str, Any] = {}
        self.bridge = self.is_bridge()
        self.shape = self.model_shape()
        self.arguments = self.read_arguments()

    # -- options -----------------------------------------------------------------------------

    def read_args(self) -> None:
        for name, value in self.shape.items():
            self.args[name] = value
            self.places[name] = self.document.key_place(("model",))
        written: dict[str, _Argument] = {}
        for one in self.arguments:
            same = one.target.replace("-", "_").lstrip("+")
            if same in written:
                first = written[same]
                message = f"args.{one.key} is the same option as args.{first.key}"
                message += f" on line {first.place.line}" if first.key == one.key else ""
                self.problems.append(Problem(message, one.place, "keep one of the two"))
            written.setdefault(same, one)
        for one in self.strongest():
            name, value = one.name, one.value
            self.places[name], self.spellings[name] = one.place, one.spelling
            if value is None or (value is False and not self.bridge):
                # Megatron-LM: the flag is not given, whatever the model's shape says
                self.args.pop(name, None)
                continue
            self.args[name] = value
        self.read_graph_aliases()

    def read_arguments(self) -> list[_Argument]:
        """The arguments of the file, in its order.

        Bridge: nested mappings become dotted paths, and `--set` on one of them replaces it.
        """
        found: list[_Argument] = []
        written = self.content.args
        if not self.bridge:
            for key, value in written.items():
                flag = flags.launch_flag(key)
                place = self.document.key_place(("args", key))
                one = _Argument(key, value, ("args", key), place, flag, flag, f"--{flag}", 0)
                found.append(one)
            return found
        for key, value, where in flags.flatten(written):
            path: Path = ("args", *where)
            place = self.document.key_place(path)
            target, reverse = flags.bridge_path(key)
            if reverse and value is not None:
                value = not self.truth(key, value, place)
            name, rank = "", 0
            read = flags.bridge_flag(target)
            if read is not None:
                name, reverse, rank = read
                if reverse and value is not None:
                    value = not self.truth(key, value, place)
            # a bare field is shown as typed; a flag of Megatron-LM is none here
            field = target.rpartition(".")[2]
            shown = key if "." in key or key.replace("-", "_") == field else target
            if place.line == 0:  # --set
                found = [one for one in found if one.target != target]
            found.append(_Argument(key, value, path, place, target, name, shown, rank))
        return found

    def strongest(self) -> Iterable[_Argument]:
        """One argument for each option that the checks read.

        Of several config sections the first of `flags.BRIDGE_SECTIONS` counts, but where one
        switches something on that another leaves off, it is on.
        """
        chosen: dict[str, _Argument] = {}
        for one in self.arguments:
            before = chosen.get(one.name)
            if not one.name:
                continue
            if before is None:
                chosen[one.name] = one
            elif {type(one.value), type(before.value)} == {bool} and one.value != before.value:
                on = one.name not in flags.NEGATED.values()
                chosen[one.name] = one if one.value is on else before
            elif one.rank < before.rank:
                chosen[one.name] = one
        return chosen.values()

    def read_graph_aliases(self) -> None:
        """`--enable-cuda-graph` beside an impl of none is local graphs; other impls assert.

        megatron/core/transformer/transformer_config.py (0.16.1) __post_init__, and
        megatron/training/arguments.py (0.19.2) validate_args.
        """
        for name, impl in flags.CUDA_GRAPH_ALIASES.items():
            if self.flag(name) and str(self.args.get("cuda-graph-impl") or "none") == "none":
                self.args["cuda-graph-impl"] = impl
                self.places["cuda-graph-impl"] = self.places[name]

    def model_shape(self) -> dict[str, Any]:
        model = self.content.model
        if model is None:
            return {}
        place = self.document.place(("model",))
        if not isinstance(model, str):
            message = "model.hf_config is not read by this version"
            hint = "give the shape in args, or model: with one of " + ", ".join(MODELS)
            self.problems.append(Problem(message, place, hint))
            return {}
        shape = MODELS.get(model.lower())
        if shape is None:
            hint = did_you_mean(model.lower(), MODELS) or "known: " + ", ".join(MODELS)
            self.problems.append(Problem(f"unknown model '{model}'", place, hint))
        return dict(shape or {})

    def complain(self, name: str, message: str, hint: str = "") -> None:
        place = self.places.get(name, Place(self.job.file))
        self.problems.append(Problem(message, place, hint))

    def truth(self, key: str, value: Any, place: Place) -> bool:
        if isinstance(value, bool):
            return value
        if self.bridge and value in (0, 1):
            return bool(value)
        if self.bridge and isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        # Megatron-LM's switches take no value: `--bf16 1` would end its argument parser
        message = f"args.{key}: expected true or false, got {value!r}"
        self.problems.append(Problem(message, place))
        return False

    def flag(self, name: str, default: bool = False) -> bool:
        if name not in self.args:
            return default
        place = self.places.get(name, Place(self.job.file))
        return self.truth(name, self.args[name], place)

    def integer(self, name: str, least: int | None = None) -> int | None:
        """A whole number; `least` refuses smaller ones, for sizes nothing can be computed with."""
        value = self.args.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                pass
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.complain(name, f"{name}: expected a whole number, got {value!r}")
            return None
        if least is not None and value < least:
            self.complain(name, f"{name}: expected at least {least}, got {value}")
            return None
        return value

    def number(self, name: str, default: float) -> float:
        value = self.args.get(name, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            self.complain(name, f"{name}: expected a number, got {value!r}")
            return default

    def text(self, name: str) -> str | None:
        value = self.args.get(name)
        return None if value is None else str(value)

    def words(self, name: str) -> tuple[str, ...] | None:
        value = self.args.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            found = tuple(value.replace(",", " ").split())
            if len(found) > 1 and not self.bridge:  # it would go through as one argument
                hint = f"write a list: [{', '.join(found)}]"
                self.complain(name, f"args.{name}: {value!r} is one value, not several", hint)
            return found
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)

    # -- Slurm and cluster -------------------------------------------------------------------

    def slurm_options(self) -> dict[str, str | bool]:
        options: dict[str, str | bool] = {}
        for key, value in self.content.slurm.items():
            name = key.replace("_", "-").removeprefix("--")
            self.places[f"slurm.{name}"] = self.document.key_place(("slurm", key))
            if value is None or value is False:
                continue
            if isinstance(value, list):
                value = ",".join(map(str, value))
            self.refuse_abbreviation(name, key)
            options[name] = value if value is True else str(value)
            if isinstance(options[name], str) and "\n" in str(options[name]):
                self.complain(f"slurm.{name}", f"slurm.{key}: a line break cannot be rendered")
        return options

    def refuse_abbreviation(self, name: str, key: str) -> None:
        """sbatch reads its options with getopt_long, which takes a unique beginning for the name.

        So an unread `arr` would be an array, behind the back of the checks.
        """
        if name in SBATCH_OPTIONS:
            return
        meant = sorted(option for option in SBATCH_OPTIONS if option.startswith(name))
        if len(meant) == 1:
            message = f"slurm.{key}: sbatch reads --{name} as --{meant[0]}"
            hint = OWNED_OPTIONS.get(meant[0], f"write {meant[0].replace('-', '_')} in full")
            self.complain(f"slurm.{name}", message, hint)

    def count(self, options: Mapping[str, str | bool], name: str) -> int | None:
        """An sbatch count; "h100:8" counts 8, a range of nodes its minimum."""
        value = options.get(name)
        if value is None:
            return None
        digits = str(value).rsplit(":", 1)[-1].split("-")[0]
        if not digits.isdigit() or int(digits) < 1:
            message = f"slurm.{name}: expected a count above zero, got {value!r}"
            self.complain(f"slurm.{name}", message)
            return None
        return int(digits)

    def gpu_count(self, options: Mapping[str, str | bool], name: str) -> int | None:
        """GPUs of a list of `[type:]count`, all types together."""
        value = options.get(name)
        if value is None:
            return None
        return sum(self.count({name: part}, name) or 0 for part in str(value).split(",")) or None

    def gres_gpus(self, options: Mapping[str, str | bool]) -> int | None:
        """GPUs a node of `--gres`: `gpu`, `gpu:2`, `gpu:h100:4(S:0)`, several types."""
        gpus = 0
        for entry in str(options.get("gres", "")).split(","):
            kind = entry.removeprefix("gres:").removeprefix("gres/").split("(")[0].split(":")
            if kind[0] == "gpu":
                gpus += int(kind[-1]) if kind[-1].isdigit() else 1
        return gpus or None

    def sizes(self, options: Mapping[str, str | bool]) -> tuple[int, int | None, int | None]:
        """Nodes, GPUs a node and tasks a node, as far as the options say; what they say twice
        has to add up."""
        nodes = self.count(options, "nodes")
        gpus, all_gpus = (self.gpu_count(options, name) for name in ("gpus-per-node", "gpus"))
        tasks, all_tasks = (self.count(options, name) for name in ("ntasks-per-node", "ntasks"))
        for each, total in ((gpus, all_gpus), (tasks, all_tasks)):
            if nodes is None and each and total and total % each == 0:
                nodes = total // each
        nodes = nodes or 1
        gpus = self.share(gpus, all_gpus, nodes, "gpus", "GPUs")
        tasks = self.share(tasks, all_tasks, nodes, "ntasks", "tasks")
        gres = self.gres_gpus(options)
        if None not in (gres, gpus) and gres != gpus:
            message = f"slurm.gres: {gres} GPUs a node, but the other options ask for {gpus}"
            self.complain("slurm.gres", message, "keep one of them: gpus_per_node is enough")
        gpus = gpus if gpus is not None else gres
        per_task = self.count(options, "gpus-per-task")
        if per_task is not None:
            gpus = gpus if gpus is not None else per_task * (tasks or 1)
            srun = self.content.launcher == "srun"
            here = tasks or (gpus if srun else 1)
            if per_task * here != gpus:
                message = (
                    f"slurm.gpus-per-task: {here} task{'s' * (here > 1)} a node with {per_task} "
                    f"each use {per_task * here} GPUs, but a node has {gpus}"
                )
                fix = (
                    "gpus_per_task: 1, launcher srun runs one task a GPU; or launcher: torchrun"
                    if srun
                    else f"gpus_per_task: {gpus}, launcher torchrun runs one task a node"
                )
                self.complain("slurm.gpus-per-task", message, f"{fix}; or leave it out")
        return nodes, gpus, tasks

    def share(
        self, each: int | None, total: int | None, nodes: int, option: str, noun: str
    ) -> int | None:
        """A node's share of a total, which agrees with the count a node where both are given."""
        if total is None:
            return each
        nodes_word = "1 node" if nodes == 1 else f"{nodes} nodes"
        per_node = f"{option}_per_node"
        if each is not None and each * nodes != total:
            made = f"{nodes_word} with {each} {noun} each make {each * nodes}"
            hint = f"leave {option} out: nodes and {per_node} say it"
            self.complain(f"slurm.{option}", f"slurm.{option}: {total}, but {made}", hint)
            return each
        if total % nodes:
            message = f"slurm.{option}: {total} {noun} do not divide by {nodes_word}"
            below = total - total % nodes
            near = f"{below} or {below + nodes}" if below else str(nodes)
            self.complain(f"slurm.{option}", message, f"{option}: {near}, or {per_node}")
            return max(1, total // nodes)
        return total // nodes

    def version(self, text: str | None) -> Version | None:
        return None if text is None else parse_version(text)

    # -- the whole ---------------------------------------------------------------------------

    def plan(self) -> Plan:
        content = self.content
        self.read_args()
        options = self.slurm_options()
        nodes, gpus, tasks = self.sizes(options)
        ranks = gpus if gpus is not None else tasks
        if ranks is None and "slurm" not in self.job.unread:
            place = self.document.key_place(("slurm",))
            hint = "slurm: {gpus_per_node: 8}, or ntasks_per_node for ranks without a GPU"
            self.problems.append(Problem("how many GPUs a node? slurm has none", place, hint))
        if content.entrypoint is None and "entrypoint" not in self.job.unread:
            place = Place(self.job.file, 1, 1)
            hint = "entrypoint: pretrain_gpt.py"
            self.problems.append(Problem("what to run? there is no entrypoint", place, hint))
        cluster = content.cluster
        if isinstance(cluster, str):
            place = self.document.place(("cluster",))
            message = f"cluster profile '{cluster}': profiles are not read by this version"
            self.problems.append(Problem(message, place, "write cluster: {gpu: H100-80GB}"))
            cluster = Cluster()
        for key in ("gpu", "megatron_core", "torch", "transformer_engine"):
            self.places[f"cluster.{key}"] = self.document.place(("cluster", key))
        self.env_places(cluster.env)
        for name, value in (*cluster.env.items(), *content.env.items()):
            if any(char in value for char in "\n\r\0"):
                self.complain(f"env.{name}", f"env.{name}: a line break cannot reach the ranks")
        entry = content.entrypoint
        layout, vpp, vpp_option = self.layout_and_vpp()
        tp = self.integer("tensor-model-parallel-size", 1) or 1
        pp = self.integer("pipeline-model-parallel-size", 1) or 1
        hidden = self.integer("hidden-size", 1)
        heads = self.integer("num-attention-heads", 1)
        swiglu = self.flag("swiglu")
        experts = self.integer("num-experts", 1)
        vocab = self.integer("vocab-size", 1)
        num_layers = self.integer("num-layers", 1)
        layers_per_virtual = self.integer("num-layers-per-virtual-pipeline-stage", 1)
        granularity = self.text("recompute-granularity")
        if self.flag("recompute-activations"):
            granularity = "selective"  # validate_args: recompute_activations is the short form
        ep = self.integer("expert-model-parallel-size", 1) or 1
        etp = self.integer("expert-tensor-parallel-size", 1)
        offload_layers = self.integer("cpu-offloading-num-layers") or 0
        common: dict[str, Any] = dict(
            name=self.job.name,
            file=self.job.file,
            framework="megatron-bridge" if self.bridge else "megatron-lm",
            launcher=content.launcher,
            entrypoint=entry.module if isinstance(entry, ModuleEntrypoint) else entry,
            entrypoint_is_module=isinstance(entry, ModuleEntrypoint),
            python=content.python,
            workdir=content.workdir,
            setup=tuple(content.setup),
            command_args=tuple(self.command_args()),
            secrets=tuple(content.secrets),
            container=msgspec.to_builtins(content.container) if content.container else None,
            slurm=options,
            env=dict(content.env),
            setup_env=exports_of(content.setup),
            setup_unread=tuple(
                name for name, (value, _) in read_setup(content.setup).items() if value is None
            ),
            site_env=dict(cluster.env),
            facts=msgspec.to_builtins(content.facts),
            nodes=nodes,
            ranks_per_node=ranks or 1,
            gpus_per_node=gpus,
            gpu_name=cluster.gpu,
            gpu=find_gpu(cluster.gpu) if cluster.gpu else None,
            node_ram_gb=cluster.node_ram_gb,
            megatron_core=self.version(cluster.megatron_core) or NEWEST_MEGATRON_CORE,
            torch=self.version(cluster.torch),
            transformer_engine=self.version(cluster.transformer_engine),
            slurm_version=self.version(cluster.slurm),
            lora=self.lora(),
        )
        plan = Plan(
            **common,
            tp=tp,
            pp=pp,
            cp=self.integer("context-parallel-size", 1) or 1,
            ep=ep,
            etp=etp if etp is not None else self.default_etp(tp, ep),
            vpp=vpp if vpp is not None else self.vpp_from_layers(num_layers, pp),
            vpp_option=vpp_option,
            layers_per_virtual_stage=layers_per_virtual,
            layout=layout,
            first_stage_layers=self.integer("decoder-first-pipeline-num-layers"),
            last_stage_layers=self.integer("decoder-last-pipeline-num-layers"),
            account_for_embedding=self.flag("account-for-embedding-in-pipeline-split"),
            account_for_loss=self.flag("account-for-loss-in-pipeline-split"),
            microbatch_group_size=self.integer(
                "microbatch-group-size-per-virtual-pipeline-stage", 1
            ),
            # validate_args: turned off at TP=1
            sequence_parallel=self.flag("sequence-parallel") and tp > 1,
            num_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=self.query_groups(heads),
            kv_channels=self.integer("kv-channels", 1)
            or (hidden // heads if hidden and heads else None),
            ffn_hidden_size=self.integer("ffn-hidden-size", 1) or default_ffn(hidden, swiglu),
            swiglu=swiglu,
            normalization=self.text("normalization") or "LayerNorm",
            qk_layernorm=self.flag("qk-layernorm"),
            bias_linear=not self.flag("disable-bias-linear"),
            qkv_bias=self.flag("add-qkv-bias"),
            untied_embeddings=self.flag("untie-embeddings-and-output-weights"),
            learned_positions=(self.text("position-embedding-type") or "learned_absolute")
            == "learned_absolute",
            max_position_embeddings=self.integer("max-position-embeddings", 1),
            vocab_size=vocab,
            padded_vocab_size=self.padded_vocab(vocab, tp),
            hidden_dropout=self.number("hidden-dropout", 0.1),
            attention_dropout=self.number("attention-dropout", 0.1),
            num_experts=experts,
            mtp_num_layers=self.integer("mtp-num-layers"),
            seq_length=self.integer("seq-length", 1),
            micro_batch_size=self.integer("micro-batch-size", 1),
            global_batch_size=self.integer("global-batch-size", 1),
            bf16=self.flag("bf16"),
            fp16=self.flag("fp16"),
            fp8=self.text("fp8-format"),
            fp4=self.text("fp4-format"),
            distributed_optimizer=self.flag("use-distributed-optimizer"),
            optimizer=self.text("optimizer") or "adam",
            grad_reduce_in_bf16=self.flag("grad-reduce-in-bf16"),
            precision_aware_optimizer=self.flag("use-precision-aware-optimizer"),
            gradient_accumulation_fusion=not self.flag("no-gradient-accumulation-fusion"),
            megatron_fsdp=self.flag("use-megatron-fsdp") or self.flag("use-custom-fsdp"),
            torch_fsdp2=self.flag("use-torch-fsdp2"),
            nccl_ub=self.flag("use-nccl-ub"),
            recompute_granularity=granularity,
            recompute_method=self.text("recompute-method"),
            recompute_num_layers=self.integer("recompute-num-layers"),
            recompute_modules=self.recompute_modules(granularity),
            # validate_args: a number of layers turns offloading on by itself
            cpu_offloading=self.flag("cpu-offloading") or (offload_layers > 0 and not self.bridge),
            cpu_offloading_num_layers=offload_layers,
            fine_grained_activation_offloading=self.flag("fine-grained-activation-offloading"),
            optimizer_cpu_offload=self.flag("optimizer-cpu-offload"),
            cuda_graph_impl=self.text("cuda-graph-impl") or "none",
            transformer_impl=self.text("transformer-impl") or "transformer_engine",
            attention_backend=self.text("attention-backend") or "auto",
            cross_entropy_fusion=self.flag("cross-entropy-loss-fusion"),
            cross_entropy_impl=self.text("cross-entropy-fusion-impl") or "native",
            overlap_moe_expert_parallel_comm=self.flag("overlap-moe-expert-parallel-comm"),
            moe_dispatcher_backend=self.moe_backend(),
            deterministic_mode=self.flag("deterministic-mode"),
            use_sharp=self.flag("use-sharp"),
            args=dict(self.args),
            places=dict(self.places),
            spellings=dict(self.spellings),
        )
        if self.problems:
            raise JobFileError(in_order(self.problems), self.document.source)
        return plan

    def is_bridge(self) -> bool:
        content = self.content
        if content.framework is not None:
            return content.framework == "megatron-bridge"
        entry = content.entrypoint
        name = entry.module if isinstance(entry, ModuleEntrypoint) else entry or ""
        if "megatron.bridge" in name or "megatron_bridge" in name:
            return True
        return any(
            key.lstrip("+-").partition(".")[0] in flags.BRIDGE_SECTIONS
            and ("." in key or isinstance(value, Mapping))
            for key, value in content.args.items()
        )

    def env_places(self, cluster_env: Mapping[str, str]) -> None:
        """Places of variables, the strongest layer's: env, then setup, then cluster.env."""
        for name in self.content.env:
            self.places[f"env.{name}"] = self.document.key_place(("env", name))
        computed = {}  # by the shell: the block does not take these over
        for name, (value, index) in read_setup(self.content.setup).items():
            place = self.places[f"setup.{name}"] = self.document.place(("setup", index))
            if value is None:
                computed[f"env.{name}"] = place
            else:
                self.places.setdefault(f"env.{name}", place)
        for name in cluster_env:
            place = self.document.key_place(("cluster", "env", name))
            self.places.setdefault(f"env.{name}", place)
        self.places = computed | self.places

    def layout_and_vpp(self) -> tuple[str | None, int | None, str | None]:
        """The layout text, the virtual stages asked for, and the option that asked."""
        layout = self.args.get("pipeline-model-parallel-layout")
        if isinstance(layout, list):
            stages = [stage if isinstance(stage, list) else [stage] for stage in layout]
            layout = "|".join(
                "".join(LAYOUT_LETTERS.get(str(layer), str(layer)) for layer in stage)
                for stage in stages
            )
        virtual = self.integer("num-virtual-stages-per-pipeline-rank", 1)
        if virtual is not None:
            option: str | None = "num-virtual-stages-per-pipeline-rank"
        elif layout is not None:
            option = "pipeline-model-parallel-layout"
            stages_per_rank = str(layout).count("|") + 1
            pp = self.integer("pipeline-model-parallel-size", 1) or 1
            from mtlaunch.preflight.layers import LayoutError, parse_layout

            try:
                stages_per_rank = len(parse_layout(str(layout)))
            except LayoutError:
                pass  # a rule says so
            if stages_per_rank % pp == 0 and stages_per_rank > pp:
                virtual = stages_per_rank // pp
        elif "num-layers-per-virtual-pipeline-stage" in self.args:
            option = "num-layers-per-virtual-pipeline-stage"
        else:
            option = None
        # validate_args: one virtual stage is no interleaving
        virtual = None if virtual == 1 else virtual
        return (None if layout is None else str(layout)), virtual, option

    def vpp_from_layers(self, num_layers: int | None, pp: int) -> int | None:
        """Virtual stages of `--num-layers-per-virtual-pipeline-stage`, where it divides."""
        each = self.integer("num-layers-per-virtual-pipeline-stage", 1)
        if each is None or num_layers is None:
            return None
        total = num_layers + self.flag("account-for-embedding-in-pipeline-split")
        total += self.flag("account-for-loss-in-pipeline-split")
        if total % pp or (total // pp) % each:
            return None
        virtual = total // pp // each
        return virtual if virtual > 1 else None

    def query_groups(self, heads: int | None) -> int | None:
        groups = self.integer("num-query-groups", 1)
        if groups is None or not (self.bridge or self.flag("group-query-attention")):
            return heads  # Megatron-LM reads num-query-groups only with group-query-attention
        return groups

    def default_etp(self, tp: int, ep: int) -> int:
        """Expert TP when not given: TP, but 1 for Megatron-Bridge with EP above 1.

        Megatron-Bridge models/transformer_config.py _set_moe_expert_tensor_parallel_default.
        """
        return 1 if self.bridge and ep > 1 else tp

    def padded_vocab(self, vocab: int | None, tp: int) -> int | None:
        given = self.integer("padded-vocab-size", 1)
        if given is not None or vocab is None:
            return given
        multiple = (self.integer("make-vocab-size-divisible-by", 1) or VOCAB_MULTIPLE) * tp
        return -(-vocab // multiple) * multiple

    def recompute_modules(self, granularity: str | None) -> tuple[str, ...]:
        if granularity != "selective":
            return ()
        given = self.words("recompute-modules")
        return DEFAULT_RECOMPUTE_MODULES if given is None else given

    def moe_backend(self) -> str | None:
        backend = self.text("moe-flex-dispatcher-backend")
        if backend is not None:
            return backend
        return "deepep" if self.flag("moe-enable-deepep") else None

    def lora(self) -> LoraSettings | None:
        lora = self.content.lora
        if lora is None:
            return None
        for key in ("sequence_parallel", "target_modules", "dim"):
            self.places[f"lora.{key}"] = self.document.place(("lora", key))
        return LoraSettings(
            lora.dim, lora.alpha, lora.dropout, tuple(lora.target_modules), lora.sequence_parallel
        )

    def command_args(self) -> Iterable[str]:
        """The script's arguments in the order of the file, scalars as typed."""
        if self.bridge:
            for one in self.arguments:
                yield f"{one.target}={self.bridge_value(one)}"
        else:
            written = {one.name for one in self.arguments}
            for name, value in self.shape.items():
                if name not in written:
                    yield from self.lm_flag(name, value, ())
            for one in self.arguments:
                # no flag of Megatron-LM: a number of layers turns offloading on
                if one.name == "cpu-offloading" and self.args.get("cpu-offloading-num-layers"):
                    continue
                yield from self.lm_flag(one.target, one.value, one.path)
        yield from self.content.extra_args

    def bridge_value(self, argument: _Argument) -> str:
        """A value in Hydra's words; a sense that the config has the other way round is turned."""
        value: Any = self.content.args
        for part in argument.path[1:]:
            value = value[part]
        if value is None:
            return "null"
        reverse = flags.bridge_path(argument.key)[1]
        if reverse or isinstance(value, bool):
            on = self.truth(argument.key, value, argument.place)
            return str(on is not reverse).lower()
        return self.as_typed(argument.path, value)

    def lm_flag(self, key: str, value: Any, path: Path) -> Iterable[str]:
        if value is None or value is False:
            return
        yield f"--{key}"
        if value is True:
            return
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield self.as_typed((*path, index), item)
        else:
            yield self.as_typed(path, value)

    def as_typed(self, path: Path, value: Any) -> str:
        if isinstance(value, (dict, list)):
            import json

            return json.dumps(value)
        return str(self.document.as_typed(path, value) if path else value)


def default_ffn(hidden: int | None, swiglu: bool) -> int | None:
    """FFN width when not given: 4h, or 8h/3 rounded down to a multiple of 64 with SwiGLU."""
    if hidden is None:
        return None
    if not swiglu:
        return 4 * hidden
    return int((4 * hidden * 2 / 3) / SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE


def exports_of(lines: Iterable[str]) -> dict[str, str]:
    """Variables that setup lines export with a literal value; what is computed is left out.

    >>> exports_of(["export A=1 B='x y'", "module load cuda; export C=2", "export D=$HOME"])
    {'A': '1', 'B': 'x y', 'C': '2'}
    """
    read = read_setup(lines)
    return {name: value for name, (value, _) in read.items() if value is not None}


def read_setup(lines: Iterable[str]) -> dict[str, tuple[str | None, int]]:
    """Variables that setup lines export: value (None: computed by the shell) and entry of setup.

    Read as bash would, as far as it goes without running it. What stands under a condition, in a
    function or in a subshell counts as run: it may be.

    >>> read_setup(["if true; then export A=1; fi", "B=2; export B; unset A", "declare -x C=$A"])
    {'B': ('2', 1), 'C': (None, 2)}
    """
    shell = _Shell()
    for words in _commands(lines):
        shell.run(words)
    # `export A` without a value passes on what the submit shell has, which is not known here
    return {name: shell.variables[name] for name in shell.exported if name in shell.variables}


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    literal: bool  # False: the shell computes a part of it
    entry: int  # of setup


# what can stand before a command
_BEFORE_COMMAND = frozenset("then do else elif if while until { ! time builtin command".split())
_OPERATORS = ";&|()\n"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"]?)([^\s'\";&|<>()]+)\2")
_REDIRECTION = re.compile(r"[0-9]*(?:&>>?|<<<|[<>]&|>>|>\||[<>])")


def _commands(lines: Iterable[str]) -> Iterable[list[_Word]]:
    """The simple commands of shell text, each as its words."""
    starts: list[int] = []
    text = ""
    for line in lines:
        starts.append(len(text))
        text += f"{line}\n"
    words: list[_Word] = []
    ends: list[tuple[str, bool]] = []  # of here-documents that begin after this line
    at, target = 0, False  # target: the next word is a redirection's
    while at < len(text):
        char = text[at]
        if char in _OPERATORS:
            yield words
            words, target = [], False
            at += 1
            while char == "\n" and ends:
                at = _after_heredoc(text, at, *ends.pop(0))
            continue
        if char.isspace():
            at += 1
        elif char == "#":
            at = text.index("\n", at)
        elif heredoc := _HEREDOC.match(text, at):
            ends.append((heredoc[3], bool(heredoc[1])))
            at = heredoc.end()
        elif redirection := _REDIRECTION.match(text, at):
            at, target = redirection.end(), True
        else:
            word, literal, end = _word(text, at)
            if not target:
                entry = sum(start <= at for start in starts) - 1
                words.append(_Word(word, literal, entry))
            at, target = end, False
    yield words


def _after_heredoc(text: str, at: int, end: str, tabs: bool) -> int:
    """Where the shell text goes on after a here-document that begins at `at`."""
    while at < len(text):
        line, _, _ = text[at:].partition("\n")
        at += len(line) + 1
        if (line.lstrip("\t") if tabs else line) == end:
            break
    return at


def _word(text: str, at: int) -> tuple[str, bool, int]:
    """One word of shell text: without its quotes, whether all of it is literal, where it ends."""
    word, literal, quote = "", True, ""
    while at < len(text):
        char = text[at]
        if quote == "'" or (quote and char == quote):
            word, quote = (word, "") if char == quote else (word + char, quote)
            at += 1
        elif char == "\\":
            following = text[at + 1 : at + 2]
            if following != "\n":  # else: the line goes on
                keep = quote and following not in '$`"\\'
                word += char + following if keep else following
            at += 2
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            end = _closing(text, at + 1)
            word, literal, at = word + text[at:end], False, end
        elif char == "`":
            end = text.find("`", at + 1) + 1 or len(text)
            word, literal, at = word + text[at:end], False, end
        elif not quote and char in "'\"":
            quote, at = char, at + 1
        elif not quote and (char.isspace() or char in _OPERATORS or char in "<>"):
            break
        else:
            # a tilde at the start of a value is a directory
            literal = literal and char != "$" and not (char == "~" and word[-1:] in ("", "="))
            word, at = word + char, at + 1
    return word, literal, at


def _closing(text: str, at: int) -> int:
    """The end of `(...)` or `{...}` that opens at `at`."""
    opening = text[at]
    closing = ")" if opening == "(" else "}"
    depth = 0
    for position in range(at, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if depth == 0:
            return position + 1
    return len(text)


class _Shell:
    """Variables of a shell and which of them are exported."""

    def __init__(self) -> None:
        self.variables: dict[str, tuple[str | None, int]] = {}
        self.exported: dict[str, None] = {}
        self.export_all = False

    def run(self, words: list[_Word]) -> None:
        while words and words[0].text in _BEFORE_COMMAND:
            words = words[1:]
        if not words:
            return
        command, rest = words[0].text, words[1:]
        options = [word.text for word in rest if re.match(r"[-+][A-Za-z]", word.text)]
        operands = [word for word in rest if word.text not in options]
        letters = "".join(option[1:] for option in options if option[0] == "-")
        if command == "export":
            if "n" in letters:
                for word in operands:
                    self.exported.pop(word.text, None)
            elif "f" not in letters:
                self.declare(operands, export=True)
        elif command in ("declare", "typeset", "readonly"):
            self.declare(operands, export="x" in letters and command != "readonly")
        elif command == "unset" and "f" not in letters:
            for word in operands:
                self.variables.pop(word.text, None)
                self.exported.pop(word.text, None)
        elif command == "set":
            named = [word.text for word in operands] == ["allexport"]
            for option in options:
                if "a" in option or (named and option.endswith("o")):
                    self.export_all = option[0] == "-"
        elif all(_ASSIGNMENT.match(word.text) for word in words):
            self.declare(words, export=False)

    def declare(self, words: Iterable[_Word], export: bool) -> None:
        for word in words:
            assignment = _ASSIGNMENT.match(word.text)
            name = assignment[1] if assignment else word.text
            if assignment:
                literal = word.literal and not assignment[2]  # += adds to what is there
                value = word.text[assignment.end() :] if literal else None
                self.variables[name] = value, word.entry
            if (export or (self.export_all and assignment)) and _NAME.fullmatch(name):
                self.exported[name] = None
