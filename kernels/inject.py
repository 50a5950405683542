"""Attach LoRA to the model of a script that knows nothing of it.

`install` is called before the script runs. It waits for `megatron.core.models.gpt.gpt_model` to
be imported and wraps `GPTModel.__init__`: once a model chunk is built, and before Float16Module,
DistributedDataParallel or the optimizer see it, its parameters are frozen and adapters stand
beside the layers that the job file names. Nothing else is patched.

Only the standard library is imported here; torch and megatron come with the script.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mtlaunch.kernels.eligibility import VARIANTS, Layer, decide

GPT_MODULE = "megatron.core.models.gpt.gpt_model"
KNOWN_VERSIONS = "0.16 to 0.19"

logger = logging.getLogger("mtlaunch")

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LoRA:
    """The `lora` section of a job file."""

    dim: int = 32
    alpha: float = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    sequence_parallel: str = "base"

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> LoRA:
        known = tuple(cls.__dataclass_fields__)
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"unknown key in lora: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        targets = tuple(given.get("target_modules", cls.target_modules))
        lora = cls(**{**given, "target_modules": targets})
        if lora.sequence_parallel not in VARIANTS:
            raise ValueError(
                f"lora.sequence_parallel is {lora.sequence_parallel!r}; "
                f"known: {', '.join(VARIANTS)}"
            )
        if lora.dim < 1:
            raise ValueError(f"lora.dim is {lora.dim}; it must be at least 1")
        if not 0.0 <= lora.dropout < 1.0:
            raise ValueError(f"lora.dropout is {lora.dropout}; it must lie in [0, 1)")
        if not lora.target_modules:
            raise ValueError("lora.target_modules is empty; name at least one layer")
        return lora


# --- the hook ------------------------------------------------------------------------------------

_installed: LoRA | None = None


def install(lora: Mapping[str, Any], report: Report) -> None:
    """Have every GPTModel that is built from now on carry LoRA adapters.

    lora: dim, alpha, dropout, target_modules (last parts of layer names, or patterns over whole
        names, `*.layers.0.*.linear_qkv`) and sequence_parallel, the variant of ops.py.
    report: called once per model chunk with what was attached, as a JSON-able dict.

    It does not matter whether Megatron is imported already. Calling it again with the same
    settings does nothing; with others it raises ValueError.
    """
    global _installed
    settings = LoRA.from_mapping(lora)
    if _installed is not None:
        if _installed != settings:
            raise ValueError(f"LoRA is installed already, with other settings: {_installed}")
        return
    _installed = settings
    patch = functools.partial(_patch_gpt_model, lora=settings, report=report)
    if GPT_MODULE in sys.modules:
        patch(sys.modules[GPT_MODULE])
    else:
        sys.meta_path.insert(0, _AfterImport(GPT_MODULE, patch))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then` with one module as soon as its code has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_module_then(module: ModuleType) -> None:
                exec_module(module)
                self.then(module)

            spec.loader.exec_module = exec_module_then  # type: ignore[method-assign]
        return spec


def _patch_gpt_model(module: ModuleType, lora: LoRA, report: Report) -> None:
    gpt_model = getattr(module, "GPTModel", None)
    if gpt_model is None:
        raise RuntimeError(
            f"cannot attach LoRA: {GPT_MODULE} of megatron-core {_megatron_version()} has no "
            f"GPTModel; known versions are {KNOWN_VERSIONS}. Remove `lora` from the job file, or "
            "install one of those"
        )
    chunks = Counter[str]()

    def built(model: Any) -> None:
        report({"lora": attach(model, lora, chunk=chunks["built"])})
        chunks["built"] += 1

    _after_init(gpt_model, built)


def _after_init(cls: Any, then: Callable[[Any], None]) -> None:
    """Call `then` with every new object of cls, when its outermost __init__ has returned.

    A subclass may go on building after GPTModel.__init__, so that subclasses are wrapped as well.
    """

    def wrap(klass: Any) -> None:
        original = klass.__dict__.get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            outermost = "_mtlaunch_init" not in self.__dict__
            self.__dict__["_mtlaunch_init"] = True
            original(self, *args, **kwargs)
            if outermost:
                del self.__dict__["_mtlaunch_init"]
                then(self)

        klass.__init__ = __init__

    def wrap_tree(klass: Any) -> None:
        wrap(klass)
        for subclass in klass.__subclasses__():
            wrap_tree(subclass)

    def __init_subclass__(klass: Any, /, **kwargs: Any) -> None:
        super(cls, klass).__init_subclass__(**kwargs)
        wrap(klass)

    wrap_tree(cls)
    cls.__init_subclass__ = classmethod(__init_subclass__)


def _megatron_version() -> str:
    try:
        from megatron.core.package_info import __version__
    except ImportError:
        return "(unknown version)"
    return str(__version__)


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A parallel linear layer in a model chunk."""

    name: str
    module: Any
    row_parallel: bool | None  # None: a layer that adapters cannot stand beside
    is_expert: bool
    group: Any
    sequence_parallel: bool

    @property
    def surface(self) -> str:
        return self.name.rpartition(".")[2]

    def matches(self, target: str) -> bool:
        if "*" in target or "." in target:
            return fnmatch.fnmatchcase(self.name, target)
        return self.surface == target


def attach(model: Any, lora: LoRA, chunk: int = 0) -> dict[str, Any]:
    """Freeze a model chunk, put adapters beside its target layers, and say what was done.

    chunk: its number on this rank, so that the chunks of an interleaved schedule draw different
    LoRA-A. Raises ValueError when the chunk has transformer layers but no target among them.
    """
    import torch

    for parameter in model.parameters():
        parameter.requires_grad_(False)

    # Megatron seeds torch's default generator alike on the ranks of a tensor-parallel and of a
    # data-parallel group. Our own generator leaves the script's random numbers as they were.
    generator = torch.Generator().manual_seed(torch.initial_seed() + chunk)
    layers = list(_parallel_linears(model))
    matched: set[str] = set()
    decisions = Counter[tuple[str, str, str | None]]()
    left_alone = Counter[tuple[str, str]]()
    for layer in layers:
        targets = [target for target in lora.target_modules if layer.matches(target)]
        obstacle = _obstacle(layer, model.config) if targets else "not a target module"
        if obstacle is not None:
            left_alone[layer.surface, obstacle] += 1
            continue
        matched.update(targets)
        decision = decide(
            lora.sequence_parallel,
            Layer(
                surface=layer.surface,
                row_parallel=bool(layer.row_parallel),
                is_expert=layer.is_expert,
                tp=layer.group.size(),
                sequence_parallel=layer.sequence_parallel,
            ),
            model.config,
        )
        _wrap(model, layer, lora, decision.uses, generator)
        decisions[layer.surface, decision.uses, decision.reason] += 1

    if not decisions and any(".layers." in layer.name for layer in layers):
        surfaces = sorted({layer.surface for layer in layers})
        raise ValueError(
            f"LoRA attaches to nothing: none of lora.target_modules "
            f"({', '.join(lora.target_modules)}) is a layer that takes an adapter. "
            f"This model has: {', '.join(surfaces)}"
        )
    if getattr(model.config, "recompute_granularity", None) and getattr(
        model, "pre_process", False
    ):
        # Megatron's checkpointed layers get no gradient when no input of theirs requires one, and
        # the output of a frozen embedding does not.
        model.embedding.register_forward_hook(_require_grad)

    summary = _summary(model, lora, decisions, left_alone, matched)
    _log(lora, decisions, chunk)
    return summary


def _parallel_linears(model: Any) -> Iterator[Found]:
    """Every layer of a kind that LoRA could be asked for, in the model's order."""
    kinds = {
        "ColumnParallelLinear": False,
        "TEColumnParallelLinear": False,
        "TELayerNormColumnParallelLinear": False,
        "RowParallelLinear": True,
        "TERowParallelLinear": True,
        "TEGroupedLinear": None,
    }
    for name, module in model.named_modules():
        # By name, because Transformer Engine's classes exist only where it is installed.
        names = [base.__name__ for base in type(module).__mro__]
        kind = next((kind for kind in names if kind in kinds), None)
        if kind is None:
            continue
        group = getattr(module, "tp_group", None) or getattr(module, "_tp_group", None)
        yield Found(
            name=name,
            module=module,
            row_parallel=kinds[kind],
            is_expert=bool(getattr(module, "is_expert", False)) or ".experts." in name,
            group=_tensor_parallel_group() if group is None else group,
            sequence_parallel=bool(getattr(module, "sequence_parallel", False)),
        )


def _tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _obstacle(layer: Found, config: Any) -> str | None:
    """Why a target layer gets no adapter at all."""
    if layer.row_parallel is None:
        return f"no adapter for {type(layer.module).__name__}"
    if layer.is_expert and layer.group.size() > 1:
        return "no adapter for experts with expert tensor parallelism"
    if "shared_experts" in layer.name and getattr(config, "moe_shared_expert_overlap", False):
        return "no adapter for shared experts that overlap their communication"
    if getattr(layer.module, "weight", None) is None:
        return "shares its weight with another layer"
    return None


def _wrap(model: Any, layer: Found, lora: LoRA, variant: str, generator: Any) -> None:
    from mtlaunch.kernels.lora import LoRALinear, ParallelLinearAdapter

    weight = layer.module.weight  # column: [out/t, in]; row: [out, in/t]
    out_features, in_features = weight.shape
    if layer.row_parallel:
        in_features *= layer.group.size()
    else:
        out_features *= layer.group.size()
    adapter = ParallelLinearAdapter(
        in_features,
        out_features,
        lora.dim,
        group=layer.group,
        row_parallel=bool(layer.row_parallel),
        generator=generator,
        alpha=lora.alpha,
        dropout=lora.dropout,
        variant=variant,
        sequence_parallel=layer.sequence_parallel,
        gather_output=bool(getattr(layer.module, "gather_output", False)),
        dtype=getattr(model.config, "params_dtype", weight.dtype),
        device=weight.device,
        allreduce=getattr(weight, "allreduce", True),
    )
    parent_name, _, child_name = layer.name.rpartition(".")
    wrapped = LoRALinear(layer.module, adapter)
    wrapped.train(layer.module.training)
    setattr(model.get_submodule(parent_name), child_name, wrapped)


def _require_grad(module: Any, _inputs: Any, output: Any) -> None:
    if module.training and output.is_floating_point() and not output.requires_grad:
        output.requires_grad_(True)


# --- what was done -------------------------------------------------------------------------------


def _summary(
    model: Any,
    lora: LoRA,
    decisions: Counter[tuple[str, str, str | None]],
    left_alone: Counter[tuple[str, str]],
    matched: set[str],
) -> dict[str, Any]:
    fallbacks = sum(count for (_, _, reason), count in decisions.items() if reason)
    attached = sum(decisions.values())
    sizes = Counter[bool]()
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    return {
        "variant": lora.sequence_parallel,
        "attached": attached,
        "variant_modules": attached - fallbacks,
        "fallback_modules": fallbacks,
        "decisions": [
            {"surface": surface, "count": count, "uses": uses}
            | ({} if reason is None else {"reason": reason})
            for (surface, uses, reason), count in decisions.items()
        ],
        "not_matched": [target for target in lora.target_modules if target not in matched],
        "left_alone": [
            {"surface": surface, "count": count, "reason": reason}
            for (surface, reason), count in left_alone.items()
        ],
        "trainable_parameters": sizes[True],
        "frozen_parameters": sizes[False],
    }


def describe(lora: LoRA, decisions: Mapping[tuple[str, str, str | None], int]) -> str:
    """One line, e.g. `LoRA dim 8 on 4 modules: 2 re-gather (linear_qkv 1, linear_fc1 1), ...`."""
    labels = {"base": "on the base path", "regather": "re-gather", "gather-free": "gather-free"}
    groups: dict[tuple[str, str | None], dict[str, int]] = {}
    for (surface, uses, reason), count in decisions.items():
        groups.setdefault((uses, reason), {})[surface] = count
    parts = []
    for (uses, reason), surfaces in sorted(groups.items(), key=lambda item: bool(item[0][1])):
        listed = ", ".join(f"{surface} {count}" for surface, count in surfaces.items())
        why = f"; {reason}" if reason else ""
        parts.append(f"{sum(surfaces.values())} {labels[uses]} ({listed}{why})")
    return f"LoRA dim {lora.dim} on {sum(decisions.values())} modules: {', '.join(parts)}"


def _log(lora: LoRA, decisions: Mapping[tuple[str, str, str | None], int], chunk: int) -> None:
    if _global_rank() != 0:
        return
    line = describe(lora, decisions) + (f" (model chunk {chunk})" if chunk else "")
    logger.info(line)
    # Scripts rarely show the INFO messages of a logger that they do not know.
    print(f"[mtlaunch] {line}", file=sys.stderr, flush=True)


def _global_rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
