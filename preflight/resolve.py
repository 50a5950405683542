"""JobFile to Plan: Megatron's own defaulting, applied once."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from mtlaunch.preflight import flags
from mtlaunch.preflight.gpus import find_gpu
from mtlaunch.preflight.jobfile import Job, ModuleEntrypoint, did_you_mean
from mtlaunch.preflight.models import MODELS
from mtlaunch.preflight.plan import (
    NEWEST_MEGATRON_CORE,
    LoraSettings,
    Plan,
    Version,
    parse_version,
)
from mtlaunch.preflight.yaml_text import JobFileError, Path, Place, Problem

# A path with one of these heads, or an entrypoint named like this, is Megatron-Bridge's.
BRIDGE_SECTIONS = (
    "model ddp optimizer train scheduler dataset logger tokenizer checkpoint comm_overlap peft rng "
    "dist profiling mixed_precision"
).split()

# Layout lists of Megatron-Bridge name what a layout text abbreviates.
LAYOUT_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}

# Megatron-LM: default FFN width with SwiGLU is 8/3 h, rounded down to a multiple of 64
# (megatron/training/arguments.py, validate_args).
SWIGLU_MULTIPLE = 64

# make-vocab-size-divisible-by's default (megatron/training/arguments.py)
VOCAB_MULTIPLE = 128

DEFAULT_RECOMPUTE_MODULES = ("core_attn",)


def resolve(job: Job) -> Plan:
    """The Plan of a job file. Raises JobFileError for values that no launch can be made of."""
    return _Resolver(job).plan()


class _Resolver:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.content = job.content
        self.document = job.document
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}
        self.spellings: dict[str, str] = {}
        self.args: dict[str, Any] = {}

    # -- options -----------------------------------------------------------------------------

    def read_args(self, bridge: bool) -> None:
        for name, value in self.model_shape().items():
            self.args[name] = value
            self.places[name] = Place(f"model: {self.content.model}")
        written: dict[str, str] = {}
        for key, value in self.content.args.items():
            name, reverse = flags.canonical(key)
            if reverse and not bridge:  # a config field's name, no flag of Megatron-LM
                name, reverse = key.lstrip("-").replace("_", "-"), False
            place = self.document.key_place(("args", key))
            if name in written:
                message = f"args.{key} is the same option as args.{written[name]}"
                self.problems.append(Problem(message, place, "keep one of the two"))
                continue
            written[name] = key
            if reverse:
                value = not self.truth(key, value, place)
            if name in flags.CUDA_GRAPH_ALIASES and self.truth(key, value, place):
                self.args.setdefault("cuda-graph-impl", flags.CUDA_GRAPH_ALIASES[name])
                self.places.setdefault("cuda-graph-impl", place)
                self.spellings.setdefault("cuda-graph-impl", f"--{name}")
            self.places[name] = place
            self.spellings[name] = key if bridge else f"--{key.lstrip('-').replace('_', '-')}"
            if value is None or (value is False and not bridge):
                # Megatron-LM: the flag is not given, whatever the model's shape says
                self.args.pop(name, None)
                continue
            self.args[name] = value

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
        if value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
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
            return tuple(value.replace(",", " ").split())
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
            options[name] = value if value is True else str(value)
            if isinstance(options[name], str) and "\n" in str(options[name]):
                self.complain(f"slurm.{name}", f"slurm.{key}: a line break cannot be rendered")
        return options

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

    def gpus_per_node(self, options: Mapping[str, str | bool], nodes: int) -> int | None:
        per_node = self.count(options, "gpus-per-node")
        if per_node is not None:
            return per_node
        for entry in str(options.get("gres", "")).split(","):
            kind = entry.split(":")
            if kind[0] == "gpu":
                number = kind[-1].split("(")[0]
                return int(number) if number.isdigit() else 1
        total = self.count(options, "gpus")
        if total is not None:
            return max(1, total // nodes)
        per_task, tasks = (
            self.count(options, name) for name in ("gpus-per-task", "ntasks-per-node")
        )
        return per_task * (tasks or 1) if per_task is not None else None

    def version(self, text: str | None) -> Version | None:
        return None if text is None else parse_version(text)

    # -- the whole ---------------------------------------------------------------------------

    def plan(self) -> Plan:
        content = self.content
        bridge = self.is_bridge()
        self.read_args(bridge)
        options = self.slurm_options()
        nodes = self.count(options, "nodes") or 1
        gpus = self.gpus_per_node(options, nodes)
        tasks = self.count(options, "ntasks-per-node")
        ranks = gpus if gpus is not None else tasks
        if ranks is None:
            place = self.document.key_place(("slurm",))
            hint = "slurm: {gpus_per_node: 8}, or ntasks_per_node for ranks without a GPU"
            self.problems.append(Problem("how many GPUs a node? slurm has none", place, hint))
        if content.entrypoint is None:
            place = Place(self.job.file, 1, 1)
            hint = "entrypoint: pretrain_gpt.py"
            self.problems.append(Problem("what to run? there is no entrypoint", place, hint))
        cluster = content.cluster
        if isinstance(cluster, str):
            place = self.document.place(("cluster",))
            message = f"cluster profile '{cluster}': profiles are not read by this version"
            self.problems.append(Problem(message, place, "write cluster: {gpu: H100-80GB}"))
            raise JobFileError(self.problems, self.document.source)
        for key in ("gpu", "megatron_core", "torch", "transformer_engine"):
            self.places[f"cluster.{key}"] = self.document.place(("cluster", key))
        self.env_places(cluster.env)
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
            framework="megatron-bridge" if bridge else "megatron-lm",
            launcher=content.launcher,
            entrypoint=entry.module if isinstance(entry, ModuleEntrypoint) else entry,
            entrypoint_is_module=isinstance(entry, ModuleEntrypoint),
            python=content.python,
            workdir=content.workdir,
            setup=tuple(content.setup),
            command_args=tuple(self.command_args(bridge)),
            secrets=tuple(content.secrets),
            container=content.container.model_dump() if content.container else None,
            slurm=options,
            env=dict(content.env),
            setup_env=exports_of(content.setup),
            site_env=dict(cluster.env),
            facts=content.facts.model_dump(exclude_none=True),
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
            etp=etp if etp is not None else self.default_etp(tp, ep, bridge),
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
            num_query_groups=self.query_groups(heads, bridge),
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
            cpu_offloading=self.flag("cpu-offloading") or (offload_layers > 0 and not bridge),
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
            self.problems = list(dict.fromkeys(self.problems))  # some are read twice
            self.problems.sort(key=lambda p: (p.place.line, p.place.column))
            raise JobFileError(self.problems, self.document.source)
        return plan

    def is_bridge(self) -> bool:
        content = self.content
        if content.framework is not None:
            return content.framework == "megatron-bridge"
        entry = content.entrypoint
        name = entry.module if isinstance(entry, ModuleEntrypoint) else entry or ""
        if "megatron.bridge" in name or "megatron_bridge" in name:
            return True
        return any(key.partition(".")[0] in BRIDGE_SECTIONS and "." in key for key in content.args)

    def env_places(self, cluster_env: Mapping[str, str]) -> None:
        """Places of variables, the strongest layer's: env, then setup, then cluster.env."""
        for name in self.content.env:
            self.places[f"env.{name}"] = self.document.key_place(("env", name))
        for index, line in enumerate(self.content.setup):
            for name in exports_of([line]):
                place = self.document.place(("setup", index))
                self.places.setdefault(f"env.{name}", place)
        for name in cluster_env:
            place = self.document.key_place(("cluster", "env", name))
            self.places.setdefault(f"env.{name}", place)

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

    def query_groups(self, heads: int | None, bridge: bool) -> int | None:
        groups = self.integer("num-query-groups", 1)
        if groups is None or not (bridge or self.flag("group-query-attention")):
            return heads  # Megatron-LM reads num-query-groups only with group-query-attention
        return groups

    def default_etp(self, tp: int, ep: int, bridge: bool) -> int:
        """Expert TP when not given: TP, but 1 for Megatron-Bridge with EP above 1.

        Megatron-Bridge models/transformer_config.py _set_moe_expert_tensor_parallel_default.
        """
        return 1 if bridge and ep > 1 else tp

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

    def command_args(self, bridge: bool) -> Iterable[str]:
        """The script's arguments in the order of the file, scalars as typed."""
        if bridge:
            for key, value in self.content.args.items():
                yield f"{key}={self.as_typed(('args', key), value)}"
        else:
            shape = self.model_shape() if isinstance(self.content.model, str) else {}
            written = {flags.canonical(key)[0] for key in self.content.args}
            for name, value in shape.items():
                if name not in written:
                    yield from self.lm_flag(name, value, ())
            for key, value in self.content.args.items():
                yield from self.lm_flag(key, value, ("args", key))
        yield from self.content.extra_args

    def lm_flag(self, key: str, value: Any, path: Path) -> Iterable[str]:
        if value is None or value is False:
            return
        yield f"--{key.lstrip('-').replace('_', '-')}"
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
    found: dict[str, str] = {}
    for line in lines:
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            continue
        exporting = start = False
        for position, word in enumerate(words):
            if set(word) <= set(";&|"):
                exporting = False
                continue
            start = position == 0 or set(words[position - 1]) <= set(";&|")
            if start and word == "export":
                exporting = True
                continue
            name, equals, value = word.partition("=")
            if exporting and equals and name.isidentifier() and not set("$`") & set(value):
                found[name] = value
    return found
