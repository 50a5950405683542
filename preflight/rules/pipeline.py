"""How layers are cut into pipeline stages and virtual stages.

Megatron has three ways to cut: evenly, with other first and last stages, by a layout text. The
rules of one way look at jobs that use it alone (`_cut`); mixing them is a finding of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Literal

from mtlaunch.preflight import layers
from mtlaunch.preflight.arithmetic import (
    batch_is_fixed,
    consistent,
    counted_layers,
    group_fits,
    microbatches_fit,
    with_pp,
)
from mtlaunch.preflight.hints import assign, divisors, either, nearest
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule

PP = "pipeline-model-parallel-size"
EACH = "num-layers-per-virtual-pipeline-stage"
VIRTUAL = "num-virtual-stages-per-pipeline-rank"
LAYOUT = "pipeline-model-parallel-layout"
FIRST = "decoder-first-pipeline-num-layers"
LAST = "decoder-last-pipeline-num-layers"
FOR_EMBEDDING = "account-for-embedding-in-pipeline-split"
FOR_LOSS = "account-for-loss-in-pipeline-split"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"

CONFIG = "megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__"
BUILD = "megatron/core/transformer/transformer_block.py get_num_layers_to_build"
VALIDATE = "megatron/training/arguments.py validate_args"
LAYOUT_CLASS = "megatron/core/transformer/pipeline_parallel_layer_layout.py"
VERSIONS = " (0.16.1, 0.19.2)"
LM_ONLY = ("megatron-lm",)


def _uneven(plan: Plan) -> list[str]:
    given = ((FIRST, plan.first_stage_layers), (LAST, plan.last_stage_layers))
    return [option for option, value in given if value is not None]


def _accounting(plan: Plan) -> list[str]:
    given = ((FOR_EMBEDDING, plan.account_for_embedding), (FOR_LOSS, plan.account_for_loss))
    return [option for option, value in given if value]


def _virtual_options(plan: Plan) -> list[str]:
    return [option for option in (EACH, VIRTUAL, LAYOUT) if plan.args.get(option) is not None]


def _cut(plan: Plan) -> Literal["even", "uneven", "layout"] | None:
    """The one way that the job cuts its layers; None when it mixes ways, or none is known."""
    if plan.num_layers is None or plan.args.get("hybrid-layer-pattern"):
        return None
    if not plan.is_bridge and len(_virtual_options(plan)) > 1:
        return None
    uneven, accounting = _uneven(plan), _accounting(plan)
    if plan.layout is not None:
        return None if uneven or accounting else "layout"
    if uneven:
        mixed = accounting or (plan.layers_per_virtual_stage and not plan.is_bridge)
        return None if mixed else "uneven"
    return "even"


def _asked(plan: Plan, option: str) -> str:
    """The option with its value, as the user wrote them."""
    return assign(plan, option, plan.args.get(option, True))


def _counted(plan: Plan) -> str:
    """ "81 layers (80, and the loss counted as one)"."""
    total, extra = counted_layers(plan), []
    if plan.account_for_embedding:
        extra.append("the embedding")
    if plan.account_for_loss:
        extra.append("the loss")
    if not extra:
        return f"{total} layers"
    return f"{total} layers ({plan.num_layers}, and {' and '.join(extra)} counted as one each)"


def _no_interleaving(plan: Plan) -> Plan:
    return replace(plan, vpp=None, layers_per_virtual_stage=None)


def uneven_split(plan: Plan) -> tuple[int, int, int] | None:
    """First, middle and last stage's layers for a PP that does not divide, the best balanced.

    The largest stage is as small as it can be, then the ends, which hold embedding and loss, are
    as light as they can be. With virtual stages every count is a multiple of them.
    """
    assert plan.num_layers is not None
    step, middles = plan.vpp or 1, plan.pp - 2
    if middles < 0:
        return None
    best: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
    most = plan.num_layers // middles if middles else 0
    for middle in range(step, most + 1, step) if middles else (0,):
        ends = plan.num_layers - middles * middle
        if ends < 2 * step or ends % step:
            continue
        first = ends // 2 // step * step
        last = ends - first
        order = (max(middle, last), ends, last - first)
        if best is None or order < best[0]:
            best = order, (first, middle, last)
    return best[1] if best else None


def _uneven_hint(plan: Plan) -> str:
    """The flags of the best uneven split, if Megatron takes it."""
    plain = replace(plan, account_for_embedding=False, account_for_loss=False)
    note = ""
    if plan.layers_per_virtual_stage is not None:
        if plan.is_bridge:
            return ""
        plain, note = _no_interleaving(plain), f" without {plan.spelling(EACH)}"
    if _accounting(plan):
        note += " without " + " and ".join(map(plan.spelling, _accounting(plan)))
    split = uneven_split(plain)
    if split is None:
        return ""
    first, middle, last = split
    if not consistent(replace(plain, first_stage_layers=first, last_stage_layers=last)):
        return ""
    between = f" (and {middle} on each stage between)" if plan.pp > 2 else ""
    return f"{assign(plan, FIRST, first)} {assign(plan, LAST, last)}{between}{note}"


@rule("PIP001", "layers-indivisible-by-pipeline", "error", f"{VALIDATE}; {BUILD}{VERSIONS}")
def layers_indivisible(plan: Plan) -> Iterator[Finding]:
    """The layers do not divide by the pipeline stages.

    What it checks
        num-layers, plus one each for an embedding or a loss that counts as a layer, is a multiple
        of pipeline-model-parallel-size, unless first or last stage sizes or a layout say otherwise.

    Why it fails
        AssertionError in Megatron-LM's validate_args; elsewhere TransformerConfig accepts it and
        get_num_layers_to_build asserts when the model is built. Before these checks Megatron built
        the quotient's layers on each stage and dropped the rest in silence.

    Bad
        slurm: {nodes: 1, gpus_per_node: 4}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 30
          pipeline-model-parallel-size: 4

    Good
        slurm: {nodes: 1, gpus_per_node: 4}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 30
          pipeline-model-parallel-size: 4
          decoder-first-pipeline-num-layers: 7
          decoder-last-pipeline-num-layers: 7

    Stays silent
        With --hybrid-layer-pattern, which cuts by itself.
    """
    if _cut(plan) != "even" or counted_layers(plan) % plan.pp == 0:
        return
    total = counted_layers(plan)
    legal, note = [pp for pp in divisors(total) if consistent(with_pp(plan, pp))], ""
    if not legal and plan.vpp_option:
        plain, note = _no_interleaving(plan), f" without {plan.spelling(plan.vpp_option)}"
        legal = [pp for pp in divisors(total) if consistent(with_pp(plain, pp))]
    fixes = [_uneven_hint(plan)]
    if legal:
        fixes.append(assign(plan, PP, either(nearest(legal, plan.pp))) + note)
    fixes = [fix for fix in fixes if fix]
    yield Finding(
        "num-layers",
        f"{_counted(plan)} do not divide by PP {plan.pp}: {total} = {plan.pp} x "
        f"{total // plan.pp} + {total % plan.pp}, and old Megatron dropped the {total % plan.pp} "
        "in silence",
        f"use {', or '.join(fixes)}" if fixes else f"use a multiple of {plan.pp} layers",
    )


@rule("PIP002", "layers-indivisible-by-virtual-stages", "error", f"{VALIDATE}; {BUILD}{VERSIONS}")
def virtual_stages_indivisible(plan: Plan) -> Iterator[Finding]:
    """The layers of a pipeline stage do not divide into its virtual stages.

    What it checks
        With an even split, layers per stage (an embedding or loss that counts as a layer
        included) is a multiple of the virtual stages (num-virtual-stages-per-pipeline-rank, the
        field virtual_pipeline_model_parallel_size) or of the layers in each
        (num-layers-per-virtual-pipeline-stage).

    Why it fails
        AssertionError in validate_args for num-layers-per-virtual-pipeline-stage. For the other
        two TransformerConfig accepts it (with an embedding or loss counted: ValueError) and
        get_num_layers_to_build asserts when the model is built. Before these checks Megatron
        trained without the layers that are left over.

    Bad
        slurm: {nodes: 2, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 80
          pipeline-model-parallel-size: 16
          num-layers-per-virtual-pipeline-stage: 2

    Good
        slurm: {nodes: 2, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 80
          pipeline-model-parallel-size: 16
          num-layers-per-virtual-pipeline-stage: 1

    Stays silent
        Where the layers do not divide by PP (PIP001), with PP at 1 (PIP005), with other first or
        last stages (PIP003) or a layout (PIP010 and following).
    """
    if _cut(plan) != "even" or plan.pp == 1 or counted_layers(plan) % plan.pp:
        return
    each, virtual = plan.layers_per_virtual_stage, plan.vpp
    stage = counted_layers(plan) // plan.pp
    if VIRTUAL not in plan.args and each is not None:
        option, parts = EACH, each
        words = f"cannot be cut in chunks of {each}"
        kept = stage // each * each
    elif virtual is not None:
        option, parts = VIRTUAL, virtual
        words = f"cannot be cut into {virtual} virtual stages"
        kept = stage // virtual * virtual
    else:
        return
    if stage % parts == 0:
        return
    # every divisor cuts evenly; one virtual stage is no interleaving
    legal = divisors(stage) if option == EACH or not plan.is_bridge else divisors(stage)[1:]
    lost = plan.pp * (stage - kept)
    loss = f"; old Megatron trained without {lost} layers in silence" if kept else ""
    fixes = f"leave {plan.spelling(option)} out"
    if legal:
        fixes = f"use {assign(plan, option, either(legal))}, or leave it out"
    split = _uneven_hint(plan) if option == VIRTUAL else ""
    if split:
        fixes += f", or add {split}"
    yield Finding(
        option,
        f"{stage} layers per stage ({_counted(plan)} over PP {plan.pp}) {words}{loss}",
        fixes,
    )


@rule("PIP003", "uneven-stage-indivisible-by-virtual-stages", "error", CONFIG + VERSIONS)
def uneven_virtual_stages(plan: Plan) -> Iterator[Finding]:
    """A first, last or middle stage does not divide into its virtual stages.

    What it checks
        With decoder-first-pipeline-num-layers or decoder-last-pipeline-num-layers, each of the
        first, the last and the middle stages' layers is a multiple of the virtual stages.

    Why it fails
        ValueError in TransformerConfig (first, last and middle stage), AssertionError in
        get_num_layers_to_build for what is left.

    Bad
        slurm: {nodes: 1, gpus_per_node: 4}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 14
          pipeline-model-parallel-size: 4
          num-virtual-stages-per-pipeline-rank: 2
          decoder-first-pipeline-num-layers: 3
          decoder-last-pipeline-num-layers: 3

    Good
        slurm: {nodes: 1, gpus_per_node: 4}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 12
          pipeline-model-parallel-size: 4
          num-virtual-stages-per-pipeline-rank: 2
          decoder-first-pipeline-num-layers: 2
          decoder-last-pipeline-num-layers: 2

    Stays silent
        Where the stages do not add up in the first place (PIP004), and with PP at 1 (PIP005).
    """
    if _cut(plan) != "uneven" or plan.vpp is None or plan.pp == 1:
        return
    per_rank = layers.layers_per_rank(plan)
    if per_rank is None or not any(count % plan.vpp for count in per_rank):
        return
    names = ["first", *["middle"] * (plan.pp - 2), "last"]
    wrong = dict.fromkeys(
        f"{count} on the {name} stage{'s' if name == 'middle' and plan.pp > 3 else ''}"
        for name, count in zip(names, per_rank, strict=True)
        if count % plan.vpp
    )
    options = [option for option in _uneven(plan) if int(plan.args[option]) % plan.vpp]
    common = gcd(*per_rank)
    legal = [value for value in divisors(common) if value > 1]
    fixes = []
    split = _uneven_hint(replace(plan, first_stage_layers=None, last_stage_layers=None))
    if split:
        fixes.append(split)
    if legal:
        fixes.append(assign(plan, VIRTUAL, either(legal)))
    fixes.append(f"no {plan.spelling(VIRTUAL)}")
    yield Finding(
        options[0] if options else VIRTUAL,
        f"{either(list(wrong), 'and')}: not a multiple of {plan.vpp} virtual stages",
        f"use {', or '.join(fixes)}",
    )


@rule("PIP004", "uneven-stages-do-not-add-up", "error", f"{CONFIG}; {BUILD}{VERSIONS}")
def uneven_stages(plan: Plan) -> Iterator[Finding]:
    """First and last stage leave layers that the stages between cannot share.

    What it checks
        decoder-first-pipeline-num-layers and decoder-last-pipeline-num-layers are above zero, and
        the layers that they leave split evenly over the stages that they leave (none over none).

    Why it fails
        ValueError in TransformerConfig. With PP at 1 and only one of the two given the model
        would be that one stage.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 20
          pipeline-model-parallel-size: 1
          decoder-last-pipeline-num-layers: 1

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 20
          pipeline-model-parallel-size: 4
          decoder-last-pipeline-num-layers: 2

    Stays silent
        Together with an embedding or loss counted as a layer (PIP008), with a layout (PIP009).
    """
    if _cut(plan) != "uneven" or layers.layers_per_rank(plan) is not None:
        return
    assert plan.num_layers is not None
    first, last = plan.first_stage_layers, plan.last_stage_layers
    given = _uneven(plan)
    if plan.pp == 1:
        yield Finding(
            given[0],
            f"{' '.join(_asked(plan, option) for option in given)} with PP 1: there is one stage, "
            f"of all {plan.num_layers} layers",
            f"leave out {either([plan.spelling(option) for option in given], 'and')}, or raise "
            f"{plan.spelling(PP)}",
        )
        return
    for option, value in ((FIRST, first), (LAST, last)):
        if value is not None and value < 1:
            yield Finding(
                option,
                f"{value} layers; a stage has at least 1",
                f"leave it out, or use {_uneven_hint(_without_ends(plan))}"
                if _uneven_hint(_without_ends(plan))
                else "leave it out",
            )
            return
    left = plan.num_layers - (first or 0) - (last or 0)
    stages = plan.pp - len(given)
    split = _uneven_hint(_without_ends(plan))
    taken = " and ".join(_asked(plan, option) for option in given)
    if stages:
        problem = f"leave {left} of {plan.num_layers} layers for the other {stages} stages"
        if left > 0:
            problem += ", which do not divide"
    else:
        problem = f"make {(first or 0) + (last or 0)} layers, and num-layers is {plan.num_layers}"
    verb = problem if len(given) > 1 else problem.replace("leave", "leaves", 1)
    yield Finding(
        given[0],
        f"{taken} {verb}",
        f"use {split}" if split else f"choose stages that add up to {plan.num_layers}",
    )


def _without_ends(plan: Plan) -> Plan:
    return replace(plan, first_stage_layers=None, last_stage_layers=None)


@rule(
    "PIP005",
    "virtual-stages-without-pipeline",
    "error",
    f"{VALIDATE}; megatron/core/parallel_state.py initialize_model_parallel{VERSIONS}",
)
def virtual_without_pipeline(plan: Plan) -> Iterator[Finding]:
    """Virtual stages are asked for without a pipeline.

    What it checks
        pipeline-model-parallel-size is above 1 when there are virtual stages.

    Why it fails
        AssertionError in validate_args, RuntimeError in parallel_state.initialize_model_parallel:
        "pipeline-model-parallel size should be greater than 1 with interleaved schedule".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          num-virtual-stages-per-pipeline-rank: 2

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          num-virtual-stages-per-pipeline-rank: 2

    Stays silent
        For one virtual stage, which Megatron-LM reads as none, and where the stages themselves
        are wrong (PIP004, PIP010 and following).
    """
    cut = _cut(plan)
    if plan.pp > 1 or cut is None or _layout_fault(plan) is not None:
        return
    if cut == "uneven" and layers.layers_per_rank(plan) is None:
        return
    each = plan.layers_per_virtual_stage if VIRTUAL not in plan.args else None
    # Megatron-Bridge hands a virtual size of 1 on as it is
    one_counts = plan.is_bridge and VIRTUAL in plan.args
    if plan.vpp is None and not one_counts:
        if cut != "even" or each is None or each == counted_layers(plan):
            return
    option = plan.vpp_option or VIRTUAL
    yield Finding(
        option,
        f"{_asked(plan, option)} asks for virtual stages, which need PP above 1, and "
        f"{plan.spelling(PP)} is 1",
        f"leave {plan.spelling(option)} out, or raise {plan.spelling(PP)}",
    )


@rule("PIP006", "virtual-stage-flags-exclusive", "error", VALIDATE + VERSIONS, frameworks=LM_ONLY)
def virtual_flags_exclusive(plan: Plan) -> Iterator[Finding]:
    """More than one flag says how stages are cut into virtual stages.

    What it checks
        At most one of num-layers-per-virtual-pipeline-stage, num-virtual-stages-per-pipeline-rank
        and pipeline-model-parallel-layout is given.

    Why it fails
        AssertionError in validate_args: "No more than one of the following arguments can be set".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          num-layers-per-virtual-pipeline-stage: 2
          num-virtual-stages-per-pipeline-rank: 2

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          num-virtual-stages-per-pipeline-rank: 2

    Stays silent
        For Megatron-Bridge, whose layout may come with a virtual size that agrees (PIP012).
    """
    given = _virtual_options(plan)
    if len(given) < 2 or plan.args.get("hybrid-layer-pattern"):
        return
    words = [plan.spelling(option) for option in given]
    yield Finding(
        given[1],
        f"{either(words, 'and')} are both given; Megatron-LM takes one of them"
        if len(given) == 2
        else f"{either(words, 'and')} are all given; Megatron-LM takes one of them",
        "keep one",
    )


@rule("PIP007", "uneven-needs-num-virtual-stages", "error", VALIDATE + VERSIONS, frameworks=LM_ONLY)
def uneven_needs_count(plan: Plan) -> Iterator[Finding]:
    """Other first or last stages come with num-layers-per-virtual-pipeline-stage.

    What it checks
        With decoder-first-pipeline-num-layers or decoder-last-pipeline-num-layers the virtual
        stages are given as a number (num-virtual-stages-per-pipeline-rank).

    Why it fails
        AssertionError in validate_args: "please use --num-virtual-stages-per-pipeline-rank".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          decoder-first-pipeline-num-layers: 4
          num-layers-per-virtual-pipeline-stage: 2

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          decoder-first-pipeline-num-layers: 4
          num-virtual-stages-per-pipeline-rank: 2

    Stays silent
        For Megatron-Bridge, which has no such field.
    """
    each, uneven = plan.layers_per_virtual_stage, _uneven(plan)
    if each is None or not uneven or len(_virtual_options(plan)) > 1:
        return
    per_rank = layers.layers_per_rank(plan) if plan.num_layers is not None else None
    fix = plan.spelling(VIRTUAL)
    if per_rank is not None:
        good = [value for value in divisors(gcd(*per_rank)) if value > 1]
        if good:
            near = nearest(good, max(1, per_rank[0] // each), 1)[0]
            fix = assign(plan, VIRTUAL, near)
    yield Finding(
        EACH,
        f"{_asked(plan, EACH)} cannot come with {plan.spelling(uneven[0])}: stages of different "
        "sizes are cut by their number of virtual stages",
        f"use {fix} in its place",
    )


@rule("PIP008", "uneven-with-account-for", "error", CONFIG + VERSIONS)
def uneven_with_account_for(plan: Plan) -> Iterator[Finding]:
    """First or last stage sizes come with an embedding or loss counted as a layer.

    What it checks
        decoder-first-pipeline-num-layers and decoder-last-pipeline-num-layers are not mixed with
        account-for-embedding-in-pipeline-split and account-for-loss-in-pipeline-split.

    Why it fails
        ValueError in TransformerConfig.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          decoder-first-pipeline-num-layers: 4
          account-for-embedding-in-pipeline-split: true

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          decoder-first-pipeline-num-layers: 3

    Stays silent
        With a layout, which allows neither (PIP009).
    """
    uneven, accounting = _uneven(plan), _accounting(plan)
    if not uneven or not accounting or plan.layout is not None:
        return
    yield Finding(
        uneven[0],
        f"{plan.spelling(uneven[0])} sizes the stages by hand, {plan.spelling(accounting[0])} "
        "moves layers between them: Megatron takes one of the two",
        f"leave out {either([plan.spelling(o) for o in accounting], 'and')}, or "
        f"{either([plan.spelling(o) for o in uneven], 'and')}",
    )


@rule("PIP009", "layout-with-other-split", "error", CONFIG + VERSIONS)
def layout_with_other_split(plan: Plan) -> Iterator[Finding]:
    """A layout comes with another way to size the stages.

    What it checks
        pipeline-model-parallel-layout is not mixed with first or last stage sizes, nor with an
        embedding or loss counted as a layer.

    Why it fails
        ValueError in TransformerConfig: "pipeline_model_parallel_layout cannot be set with other
        pipeline layout arguments".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ett|ttL"
          decoder-first-pipeline-num-layers: 2

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ett|ttL"

    Stays silent
        Without a layout.
    """
    others = _uneven(plan) + _accounting(plan)
    if plan.layout is None or not others:
        return
    yield Finding(
        others[0],
        f"{plan.spelling(LAYOUT)} says where every layer goes; Megatron takes no "
        f"{plan.spelling(others[0])} beside it",
        f"leave out {either([plan.spelling(option) for option in others], 'and')}",
    )


# -- layouts: Megatron's checks in its own order, so that one fault is one finding ------------


def _layout_fault(plan: Plan) -> tuple[str, Finding] | None:
    if _cut(plan) != "layout" or plan.layout is None:
        return None
    try:
        stages = layers.parse_layout(plan.layout)
    except layers.LayoutError as error:
        return "PIP010", Finding(
            LAYOUT,
            f"{plan.layout!r}: {error}",
            "write stages of E, t, m and L with | between them, x*n and (...)*n to repeat",
        )
    count = len(stages)
    if count % plan.pp:
        low, high = count // plan.pp * plan.pp, (count // plan.pp + 1) * plan.pp
        legal = [n for n in (low, high) if n]
        return "PIP011", Finding(
            LAYOUT,
            f"{count} stages do not divide by PP {plan.pp}",
            f"use {either(legal)} stages (PP, or a multiple of it with virtual stages)",
        )
    return _layout_virtual_conflict(plan, count) or _layout_layers(plan, stages)


def _layout_virtual_conflict(plan: Plan, count: int) -> tuple[str, Finding] | None:
    given = plan.args.get(VIRTUAL)
    if given is None or int(given) == count // plan.pp:
        return None
    return "PIP012", Finding(
        VIRTUAL,
        f"{_asked(plan, VIRTUAL)}, but the layout's {count} stages over PP {plan.pp} are "
        f"{count // plan.pp} a rank",
        f"leave it out, or use {assign(plan, VIRTUAL, count // plan.pp)}",
    )


def _layout_layers(plan: Plan, stages: list[str]) -> tuple[str, Finding] | None:
    flat, mtp = "".join(stages), plan.mtp_num_layers or 0
    for letter, name, index in (("E", "embedding", 0), ("L", "loss", -1)):
        where = "first" if index == 0 else "last"
        if flat.count(letter) != 1 or flat[index] != letter:
            found = flat.count(letter)
            problem = f"{found} times {letter}" if found != 1 else f"{letter} is not the {where}"
            return "PIP013", Finding(
                LAYOUT,
                f"{plan.layout!r}: {problem}; {letter} ({name}) stands once, {where} of all",
                f"{'start' if index == 0 else 'end'} the layout with {letter}",
            )
    if flat.count("t") != plan.num_layers:
        return "PIP014", Finding(
            LAYOUT,
            f"the layout places {flat.count('t')} decoder layers, num-layers is {plan.num_layers}",
            f"place {plan.num_layers} t, or use {assign(plan, 'num-layers', flat.count('t'))}",
        )
    if flat.count("m") != mtp:
        return "PIP014", Finding(
            LAYOUT,
            f"the layout places {flat.count('m')} MTP layers, mtp-num-layers is {mtp}",
            f"place {mtp} m, or use {assign(plan, 'mtp-num-layers', flat.count('m'))}"
            if flat.count("m")
            else f"place {mtp} m after the last t, or leave {plan.spelling('mtp-num-layers')} out",
        )
    problem = _mtp_problem(plan, stages) if mtp else ""
    if problem:
        return "PIP015", Finding(
            LAYOUT,
            f"{plan.layout!r}: {problem}",
            f"put all {mtp} m into one stage among the last {plan.pp}, after every t",
        )
    return None


def _mtp_problem(plan: Plan, stages: list[str]) -> str:
    flat = "".join(stages)
    if "t" in flat[flat.index("m") :]:
        return "a decoder layer (t) comes after an MTP layer (m)"
    # stage i is virtual stage i // PP of rank i % PP
    early = [stage for stage in stages[: -plan.pp] if "m" in stage]
    if early:
        return f"stage {early[0]!r} has MTP layers (m), but is not its rank's last virtual stage"
    if sum("m" in stage for stage in stages) > 1:
        return "MTP layers (m) in more than one stage"
    return ""


def _of_layout(plan: Plan, id: str) -> Iterator[Finding]:
    fault = _layout_fault(plan)
    if fault is not None and fault[0] == id:
        yield fault[1]


@rule("PIP010", "layout-unreadable", "error", f"{LAYOUT_CLASS} parse_str_to_list{VERSIONS}")
def layout_unreadable(plan: Plan) -> Iterator[Finding]:
    """The layout has a letter that Megatron does not know.

    What it checks
        pipeline-model-parallel-layout, its repetitions written out, has only E (embedding),
        t (decoder layer), m (MTP layer), L (loss) and | between stages; commas do not count.

    Why it fails
        AssertionError: "Invalid layer character".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Edd|ddL"

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Et*2|t*2L"

    Stays silent
        When the layout is mixed with other ways to cut (PIP006, PIP009).
    """
    yield from _of_layout(plan, "PIP010")


@rule("PIP011", "layout-stage-count", "error", f"{LAYOUT_CLASS} __init__; {VALIDATE}{VERSIONS}")
def layout_stage_count(plan: Plan) -> Iterator[Finding]:
    """The layout's stages do not divide by PP.

    What it checks
        The number of stages that | separates is PP, or a multiple of it (the virtual stages).

    Why it fails
        AssertionError: "pipeline_model_parallel_layout must be divisible by
        pipeline_model_parallel_size". A | at the end adds an empty stage.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Et|tt|tL"

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Et|t|t|tL"

    Stays silent
        When the layout cannot be read (PIP010).
    """
    yield from _of_layout(plan, "PIP011")


@rule("PIP012", "layout-virtual-stages-conflict", "error", CONFIG + VERSIONS)
def layout_virtual_conflict(plan: Plan) -> Iterator[Finding]:
    """The virtual pipeline size is not the layout's.

    What it checks
        virtual_pipeline_model_parallel_size, when given beside a layout, is the layout's stages
        over PP.

    Why it fails
        AssertionError in TransformerConfig: "virtual_pipeline_model_parallel_size conflicts with
        pipeline_model_parallel_layout".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        framework: megatron-bridge
        args:
          model.num_layers: 4
          model.pipeline_model_parallel_size: 2
          model.pipeline_model_parallel_layout: "Et|t|t|tL"
          model.virtual_pipeline_model_parallel_size: 4

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: train.py
        framework: megatron-bridge
        args:
          model.num_layers: 4
          model.pipeline_model_parallel_size: 2
          model.pipeline_model_parallel_layout: "Et|t|t|tL"
          model.virtual_pipeline_model_parallel_size: 2

    Stays silent
        For Megatron-LM, which does not take both (PIP006).
    """
    yield from _of_layout(plan, "PIP012")


@rule("PIP013", "layout-ends", "error", f"{LAYOUT_CLASS} validate_layer_layout{VERSIONS}")
def layout_ends(plan: Plan) -> Iterator[Finding]:
    """The layout does not start with the embedding or end with the loss.

    What it checks
        E stands once, as the first of all letters, and L once, as the last.

    Why it fails
        AssertionError in validate_layer_layout, when TransformerConfig is built.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ett|tt"

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ett|ttL"

    Stays silent
        When the number of stages is wrong (PIP011, PIP012).
    """
    yield from _of_layout(plan, "PIP013")


@rule("PIP014", "layout-layer-count", "error", f"{LAYOUT_CLASS} validate_layer_layout{VERSIONS}")
def layout_layer_count(plan: Plan) -> Iterator[Finding]:
    """The layout places more or fewer layers than the model has.

    What it checks
        The t of the layout are num-layers, its m are mtp-num-layers.

    Why it fails
        AssertionError in validate_layer_layout: "Number of decoder layers ... must match
        num_layers".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 5
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ett|ttL"

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 5
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ettt|ttL"

    Stays silent
        When E or L are wrong (PIP013).
    """
    yield from _of_layout(plan, "PIP014")


@rule("PIP015", "layout-mtp-placement", "error", f"{LAYOUT_CLASS} validate_layer_layout{VERSIONS}")
def layout_mtp_placement(plan: Plan) -> Iterator[Finding]:
    """The layout places MTP layers where Megatron does not run them.

    What it checks
        Every m comes after every t, all m are in one stage, and that stage is the last virtual
        stage of its rank.

    Why it fails
        AssertionError in validate_layer_layout.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          mtp-num-layers: 1
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ettm|ttL"

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          mtp-num-layers: 1
          pipeline-model-parallel-size: 2
          pipeline-model-parallel-layout: "Ett|ttmL"

    Stays silent
        When the number of m is wrong (PIP014).
    """
    yield from _of_layout(plan, "PIP015")


@rule(
    "PIP016",
    "microbatches-do-not-interleave",
    "error",
    "megatron/core/pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving"
    + VERSIONS,
)
def microbatches_do_not_interleave(plan: Plan) -> Iterator[Finding]:
    """A step has too few microbatches, or an odd number of them, for interleaving.

    What it checks
        With virtual stages, microbatches a step (global batch / (micro batch * DP)) are at least
        the group size (microbatch-group-size-per-virtual-pipeline-stage; PP when not given), the
        group size is at least PP, and the rest of microbatches over group size is 0 or at least
        PP.

    Why it fails
        ValueError ("The number of contiguous micro-batches in a virtual pipeline stage should
        range in ...") or RuntimeError (dependency bubbles) in the first training step, after the
        model was built and the checkpoint loaded.

    Bad
        slurm: {nodes: 6, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 48
          pipeline-model-parallel-size: 6
          num-virtual-stages-per-pipeline-rank: 4
          micro-batch-size: 1
          global-batch-size: 24

    Good
        slurm: {nodes: 6, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 48
          pipeline-model-parallel-size: 6
          num-virtual-stages-per-pipeline-rank: 4
          micro-batch-size: 1
          global-batch-size: 48

    Stays silent
        Without virtual stages, without micro-batch-size, when the global batch does not divide
        (DAT001) or changes during training, and for Megatron-Bridge without a global batch.
    """
    if microbatches_fit(plan) or not batch_is_fixed(plan):
        return
    count, dp, mbs = plan.num_microbatches, plan.dp, plan.micro_batch_size
    assert count is not None and dp is not None and mbs is not None
    group = plan.microbatch_group_size or plan.pp
    if group < plan.pp:
        yield Finding(
            GROUP,
            f"groups of {group} microbatches are smaller than PP {plan.pp}",
            f"leave it out (it is PP then), or use {assign(plan, GROUP, plan.pp)} or more",
        )
        return
    limit = f"interleaved PP {plan.pp} needs at least {group}"
    if count >= group:
        limit = f"interleaved PP {plan.pp} needs a multiple of {group}"
        if group > plan.pp:
            limit += f", or a rest of at least {plan.pp}"
    good = [n for n in range(1, count + group + 1) if group_fits(n, group, plan.pp)]
    below = [n for n in good if n < count][-1:]
    near = below + [n for n in good if n > count][:1]
    batches = [n * mbs * dp for n in near]
    option = plan.vpp_option or VIRTUAL
    batch = plan.global_batch_size if plan.global_batch_size is not None else mbs * dp
    yield Finding(
        "global-batch-size",
        f"{count} microbatch{'' if count == 1 else 'es'} a step ({batch} / ({mbs} x DP {dp})): "
        f"{limit}",
        f"use {assign(plan, 'global-batch-size', either(batches))}, or drop virtual stages "
        f"({plan.spelling(option)})",
    )


@rule(
    "PIP017", "no-overlap-p2p-needs-three-stages", "error", VALIDATE + VERSIONS, frameworks=LM_ONLY
)
def no_overlap_needs_three_stages(plan: Plan) -> Iterator[Finding]:
    """Virtual stages over two ranks come without overlap of their communication.

    What it checks
        With virtual stages and no-overlap-p2p-communication, PP is above 2.

    Why it fails
        AssertionError in validate_args: several sends and receives would run between the same two
        ranks in one batch.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          num-virtual-stages-per-pipeline-rank: 2
          no-overlap-p2p-communication: true

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          num-virtual-stages-per-pipeline-rank: 2

    Stays silent
        Without virtual stages, and with PP at 1 (PIP005).
    """
    if not plan.args.get("no-overlap-p2p-communication") or plan.vpp is None or plan.pp != 2:
        return
    yield Finding(
        "no-overlap-p2p-communication",
        f"virtual stages without overlap need PP above 2, and {plan.spelling(PP)} is {plan.pp}",
        "leave it out",
    )
