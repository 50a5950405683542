"""Random jobs, judged by the rules and by the megatron-core that is installed.

Both answers must agree on every job, but for what STRICTER names. Every Plan says which
megatron-core and torch are installed, so the rules judge for the version that answers.
"""

from __future__ import annotations

import inspect
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mtlaunch.preflight import layers
from mtlaunch.preflight.plan import Plan, parse_version
from mtlaunch.preflight.rule import run_rules

pytestmark = pytest.mark.train

torch = pytest.importorskip("torch")
core = pytest.importorskip("megatron.core")

CORE, TORCH = core.__version__, torch.__version__.split("+")[0]
CORE_VERSION = parse_version(CORE)

JOBS = int(os.environ.get("MTLAUNCH_ORACLE_JOBS", "400"))
SEED = int(os.environ.get("MTLAUNCH_SEED", "1"))

# Jobs that Megatron takes and the rules refuse, on purpose.
STRICTER: dict[str, Callable[[dict[str, Any]], bool]] = {
    # with one stage, sizes of a first and a last stage contradict each other; Megatron takes the
    # last one's for the whole model
    "both ends at PP 1": lambda a: a["pp"] == 1 and None not in (a["first"], a["last"]),
}


def layout_text(rng: random.Random, num_layers: int, stages: int, mtp: int) -> str:
    """A layout that is right about half of the time."""
    cuts = sorted(rng.choices(range(num_layers + 1), k=stages - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    parts = ["t" * size for size in sizes]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * mtp + "L"
    slip = rng.randrange(14)
    if slip == 0:
        parts[0] = parts[0][1:]
    elif slip == 1:
        parts[-1] = parts[-1][:-1]
    elif slip == 2:
        parts[rng.randrange(stages)] += "t"
    elif slip == 3:
        parts[rng.randrange(stages)] += "m"
    elif slip == 4:
        parts[rng.randrange(stages)] += rng.choice("xeT ")
    elif slip == 5 and mtp:
        parts[-1] = parts[-1].replace("m", "")
        parts[rng.randrange(stages)] += "m" * mtp
    elif slip == 6 and stages > 1:
        parts[-1] = parts[-1].replace("L", "")
        parts[-2] += "L"
    return "|".join(parts)


def random_job(rng: random.Random) -> dict[str, Any]:
    pp = rng.choice([1, 2, 2, 3, 4, 4, 5, 8])
    job: dict[str, Any] = dict.fromkeys(("virtual", "first", "last", "layout", "mtp"))
    job |= {"pp": pp, "for_embedding": False, "for_loss": False}
    kind = rng.choice(["even", "uneven", "uneven", "accounting", "layout", "layout", "mixed"])
    job["virtual"] = rng.choice([None, None, 2, 2, 3, 4])
    unit = pp * (job["virtual"] or 1)
    job["num_layers"] = rng.choice([unit * rng.randint(1, 4), rng.randint(1, 32)])
    if kind in ("accounting", "mixed"):
        job["for_embedding"], job["for_loss"] = rng.choice(
            [(True, True), (True, False), (False, True)]
        )
        counted = job["for_embedding"] + job["for_loss"]
        if rng.random() < 0.7:
            job["num_layers"] = max(1, unit * rng.randint(1, 4) - counted)
    if kind in ("uneven", "mixed"):
        step = job["virtual"] or 1
        ends = {name: step * rng.randint(1, 3) for name in ("first", "last")}
        if rng.random() < 0.4:
            ends.pop(rng.choice(("first", "last")))
        middle = pp - len(ends)
        if middle >= 0 and rng.random() < 0.8:
            job["num_layers"] = sum(ends.values()) + middle * step * rng.randint(1, 3)
        if rng.random() < 0.15:
            ends[rng.choice(list(ends))] = rng.choice([0, -1, 1, 5])
        job |= ends
    if kind == "layout" or (kind == "mixed" and rng.random() < 0.3):
        job["mtp"] = rng.choice([None, None, 1, 2])
        virtual = rng.choice([1, 1, 2, 3])
        stages = max(1, pp * virtual + rng.choice([0, 0, 0, 0, 1]))
        job["layout"] = layout_text(rng, job["num_layers"], stages, job["mtp"] or 0)
        job["virtual"] = rng.choice([None, None, virtual if virtual > 1 else None, 2])
    return job


def as_args(job: dict[str, Any]) -> dict[str, Any]:
    args = {
        "num_layers": job["num_layers"],
        "pipeline_model_parallel_size": job["pp"],
        "virtual_pipeline_model_parallel_size": job["virtual"],
        "num_layers_in_first_pipeline_stage": job["first"],
        "num_layers_in_last_pipeline_stage": job["last"],
        "account_for_embedding_in_pipeline_split": job["for_embedding"] or None,
        "account_for_loss_in_pipeline_split": job["for_loss"] or None,
        "pipeline_model_parallel_layout": job["layout"],
        "mtp_num_layers": job["mtp"],
    }
    return {key: value for key, value in args.items() if value is not None}


@pytest.fixture
def plan(plan: Any) -> Callable[..., Plan]:
    """Plans for the versions that are installed, unless a test names others."""

    def make(args: Any = None, cluster: Any = None, **job: Any) -> Plan:
        return plan(args, cluster={"megatron_core": CORE, "torch": TORCH, **(cluster or {})}, **job)

    return make


Build = Callable[[dict[str, Any]], list[list[int]]]


@pytest.fixture
def megatron_builds(refused: Any, built_layers: Any, initialize_parallel_state: Any) -> Build:
    """Decoder layers by rank and virtual stage, as megatron-core builds them; or Refused."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def build(job: dict[str, Any]) -> list[list[int]]:
        try:
            config = TransformerConfig(
                hidden_size=64,
                num_attention_heads=8,
                pipeline_dtype=torch.bfloat16,
                **as_args(job),
            )
            virtual = config.virtual_pipeline_model_parallel_size
            if job["pp"] == 1 and virtual is not None:
                initialize_parallel_state(1, virtual_pipeline_model_parallel_size=virtual)
        except (ValueError, AssertionError, RuntimeError) as error:
            raise refused(str(error)) from error
        built: list[list[int]] = built_layers(config)
        return built

    return build


@pytest.fixture
def bridge_plan(plan: Any) -> Callable[[dict[str, Any]], Plan]:
    """The job as Megatron-Bridge writes it, whose fields are TransformerConfig's."""

    def make(job: dict[str, Any]) -> Plan:
        return plan(as_args(job), gpus=job["pp"], framework="megatron-bridge")

    return make


def jobs() -> Iterator[dict[str, Any]]:
    rng = random.Random(SEED)
    for _ in range(JOBS):
        yield random_job(rng)


@pytest.mark.filterwarnings("ignore")
def test_pipeline_family_agrees_with_megatron(
    bridge_plan: Any, megatron_builds: Build, refused: Any
) -> None:
    wrong, counts = [], Counter[str]()
    for job in jobs():
        plan = bridge_plan(job)
        found = list(run_rules(plan, select=("PIP", "PAR")))
        try:
            built, reason = megatron_builds(job), ""
        except refused as error:
            built, reason = [], str(error)
        counts[f"{'refused' if reason else 'taken'} by Megatron"] += 1
        counts.update({finding.id for finding in found})
        if len(found) > 1:
            wrong.append(f"{job}: {[f.id for f in found]} for one cause")
        if not reason and not found:
            chunks = layers.chunks(plan)
            ours = [[chunk.decoder_layers for chunk in row] for row in chunks or ()]
            if ours != built:
                wrong.append(f"{job}: {ours}, and Megatron builds {built}")
        elif bool(reason) != bool(found):
            if not any(exception(job) for exception in STRICTER.values()) or reason:
                verdict = [f"{f.id} {f.message}" for f in found] or "accepted"
                wrong.append(f"{job}: {verdict}, and Megatron: {reason or 'taken'}")
    assert not wrong, f"seed {SEED}: {len(wrong)} of {JOBS}\n" + "\n".join(wrong[:20])
    assert min(counts["refused by Megatron"], counts["taken by Megatron"]) > JOBS / 5, counts
    if "MTLAUNCH_SEED" in os.environ:
        return
    # every rule that TransformerConfig and the block can decide is reached
    reached = {"PIP001", "PIP002", "PIP003", "PIP004", "PIP008", "PIP009"}
    assert reached | {f"PIP01{n}" for n in range(6)} <= set(counts), counts


@pytest.mark.filterwarnings("ignore")
def test_hints_of_stage_sizes_are_taken_by_megatron(
    bridge_plan: Any, megatron_builds: Build
) -> None:
    """What a finding proposes for the stages passes Megatron as well as the rules."""
    tried = 0
    for job in jobs():
        for finding in run_rules(bridge_plan(job), select=("PIP001", "PIP003", "PIP004")):
            pair = re.search(
                r"num_layers_in_first_pipeline_stage=(\d+) num_layers_in_last_pipeline_stage=(\d+)",
                finding.hint,
            )
            if pair is None:
                continue
            tried += 1
            fixed = {**job, "first": int(pair[1]), "last": int(pair[2])}
            fixed |= {"for_embedding": False, "for_loss": False}
            assert megatron_builds(fixed), (finding, job)
            assert not list(run_rules(bridge_plan(fixed), select=("PIP",))), (finding, job)
    assert tried > 10


# -- attention heads and query groups ----------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_heads_and_groups_agree_with_megatron(plan: Any) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    for heads in (6, 8, 12):
        for groups in (1, 2, 3, 4, 6, heads):
            for tp in (1, 2, 3, 4, 6, 8):
                sizes = {"num_attention_heads": heads, "num_query_groups": groups}
                sizes |= {"tensor_model_parallel_size": tp}
                try:
                    TransformerConfig(num_layers=2, hidden_size=24 * heads, **sizes)
                    taken = True
                except ValueError:
                    taken = False
                job = plan({"num_layers": 2, **sizes}, gpus=tp, framework="megatron-bridge")
                found = list(run_rules(job, select=("PAR",)))
                assert (not found) == taken, (sizes, found)
                assert len(found) <= 1


# -- the world and its grids -------------------------------------------------------------------


def test_world_and_expert_grid_agree_with_parallel_state(
    plan: Any, initialize_parallel_state: Any
) -> None:
    rng = random.Random(SEED)
    answers = Counter[bool]()
    for _ in range(60):
        world = rng.choice([4, 6, 8, 12, 16])
        sizes = {
            "tensor_model_parallel_size": rng.choice([1, 2, 4]),
            "pipeline_model_parallel_size": rng.choice([1, 1, 2, 3]),
            "context_parallel_size": rng.choice([1, 1, 2]),
            "expert_model_parallel_size": rng.choice([1, 2, 4, 8]),
            "expert_tensor_parallel_size": rng.choice([None, 1, 2]),
        }
        try:
            initialize_parallel_state(world, **sizes)
            taken = True
        except RuntimeError:
            taken = False
        args = {"num-layers": 6, "num-experts": 8}
        args |= {k.replace("_", "-"): v for k, v in sizes.items() if v is not None}
        found = list(run_rules(plan(args, gpus=world), select=("PAR",)))
        assert (not found) == taken, (world, sizes, found)
        assert len(found) <= 1
        answers[taken] += 1
    assert min(answers.values()) > 10


# -- batch and the interleaved schedule --------------------------------------------------------


def test_microbatch_groups_agree_with_the_interleaved_schedule(
    plan: Any, interleaving_guard: Any
) -> None:
    base = {"num-layers": 48, "num-virtual-stages-per-pipeline-rank": 2, "micro-batch-size": 1}
    for pp in (2, 3, 4):
        for count in range(1, 14):
            for group in (None, 1, 2, 3, 4, 6):
                args = {**base, "pipeline-model-parallel-size": pp, "global-batch-size": count}
                if group is not None:
                    args["microbatch-group-size-per-virtual-pipeline-stage"] = group
                try:
                    interleaving_guard(pp, count, group or pp)
                    taken = True
                except (ValueError, RuntimeError):
                    taken = False
                found = list(run_rules(plan(args, gpus=pp), select=("PIP", "DAT")))
                assert (not found) == taken, (pp, count, group, found)


def test_global_batch_agrees_with_the_calculator(plan: Any) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    for gbs in range(1, 20):
        for mbs in (1, 2, 3):
            for dp in (1, 2, 4):
                try:
                    ConstantNumMicroBatchesCalculator(gbs, mbs, dp, False, 0)
                    taken = True
                except AssertionError:
                    taken = False
                args = {"num-layers": 2, "micro-batch-size": mbs, "global-batch-size": gbs}
                assert (not list(run_rules(plan(args, gpus=dp), select=("DAT",)))) == taken


# -- offloading --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    "offload",
    [
        {},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
    ],
)
def test_offloading_agrees_with_megatron(plan: Any, pp: int, offload: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 8, "num_attention_heads": 8, "pipeline_model_parallel_size": pp}
    try:
        TransformerConfig(hidden_size=64, pipeline_dtype=torch.bfloat16, **sizes, **offload)
        taken = True
    except ValueError:
        taken = False
    job = plan({**sizes, **offload}, framework="megatron-bridge")
    assert (not list(run_rules(job, select=("OFF001",)))) == taken


# -- guards that read the environment ----------------------------------------------------------

ALLOCATOR_VALUES = [
    "expandable_segments:True",
    "max_split_size_mb:512,expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:512",
    "expandable_segments:False",
    "max_split_size_mb:512",
    "",
]


# as torch.__version__ says it: builds of a release, and of what comes before one
TORCH_VERSIONS = ["2.6.0", "2.10.1", "2.11.0a0+eb65b36914", "2.11.0", "2.14.1"]


def set_torch_version(patch: pytest.MonkeyPatch, version: str) -> None:
    """Megatron's guards compare this version, not the one that is installed."""
    from megatron.core import utils
    from packaging.version import Version

    patch.setattr(utils, "get_torch_version", lambda: Version(version))


@pytest.mark.parametrize("torch_version", TORCH_VERSIONS)
def test_user_buffers_agree_with_megatron(
    plan: Any, monkeypatch: pytest.MonkeyPatch, torch_version: str
) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    set_torch_version(monkeypatch, torch_version)
    refusals = []
    for value in ALLOCATOR_VALUES:
        for user_buffers in (True, False):
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
            try:
                DistributedDataParallelConfig(nccl_ub=user_buffers)
                taken = True
            except ValueError:
                taken = False
                refusals.append(value)
            job = plan(
                {"num-layers": 2, "use-nccl-ub": user_buffers},
                env={"PYTORCH_CUDA_ALLOC_CONF": value},
                cluster={"torch": torch_version},
            )
            found = list(run_rules(job, select=("ENV001",)))
            assert (not [f for f in found if f.level == "error"]) == taken, (value, user_buffers)
            # where Megatron lets the pair pass there is a warning still
            assert bool(found) == (user_buffers and "True" in value)
    guarded = CORE_VERSION < (0, 18) or parse_version(torch_version) < (2, 11)
    assert refusals == [value for value in ALLOCATOR_VALUES if guarded and "True" in value]


@pytest.mark.parametrize("torch_version", [None, *TORCH_VERSIONS])
def test_the_block_passes_the_user_buffer_guard(
    plan: Any, monkeypatch: pytest.MonkeyPatch, torch_version: str | None
) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from mtlaunch.preflight import environment

    set_torch_version(monkeypatch, torch_version or "2.6.0")  # not given: the strictest there is
    for user_buffers in (True, False):
        args = {"num-layers": 2, "use-nccl-ub": user_buffers}
        value = environment.allocator_value(plan(args, cluster={"torch": torch_version}))
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        if value is not None:
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
        assert (value is None) == user_buffers
        DistributedDataParallelConfig(nccl_ub=user_buffers)


GPU_OF = {(8, 0): "A100-80GB", (9, 0): "H100-80GB", (10, 0): "B200-192GB"}


def set_block(patch: pytest.MonkeyPatch, job: Plan) -> None:
    """The environment that the ranks of a job get."""
    from mtlaunch.preflight import environment

    for variable in environment.block(job):
        if variable.value is None:
            patch.delenv(variable.name, raising=False)
        else:
            patch.setenv(variable.name, variable.value)


@pytest.fixture
def builds_graph_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Whether CudaGraphManager, which makes local graphs, starts on a GPU of a capability."""
    from megatron.core.tensor_parallel import random as tp_random
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, cuda_graph_impl="local"
    )
    options: dict[str, Any] = {"need_backward": False}
    if "pg_collection" in inspect.signature(cuda_graphs.CudaGraphManager).parameters:  # 0.19
        options["pg_collection"] = SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))
    else:
        state = cuda_graphs.parallel_state
        monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: 1)
    for name in ("graph_pool_handle", "current_device", "Stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)  # what comes after the guard

    def build(capability: tuple[int, int]) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        try:
            cuda_graphs.CudaGraphManager(config, **options)
        except AssertionError as error:
            assert "NCCL_GRAPH_REGISTER" in str(error)
            return False
        return True

    tp_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    yield build
    tp_random.initialize_rng_tracker(force_reset=True)


@pytest.fixture
def builds_te_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether TECudaGraphHelper, which makes Transformer Engine's graphs, passes its guard."""
    from megatron.core.transformer import cuda_graphs

    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    config = SimpleNamespace(cuda_graph_impl="transformer_engine")
    options = {}
    if "pg_collection" in inspect.signature(cuda_graphs.TECudaGraphHelper).parameters:  # 0.19
        options["pg_collection"] = SimpleNamespace()

    def build(capability: tuple[int, int]) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        try:
            cuda_graphs.TECudaGraphHelper(None, config, 128, 1, **options)
        except AssertionError as error:
            assert "NCCL_GRAPH_REGISTER" in str(error)
            return False
        except AttributeError as error:  # past the guard: there is no model and no whole config
            assert "SimpleNamespace" in str(error), error
        return True

    return build


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capability", GPU_OF)
@pytest.mark.parametrize("register", [None, "0", "1", ""])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_graphs_agree_with_megatron(
    plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    builds_graph_manager: Callable[..., bool],
    builds_te_graphs: Callable[..., bool],
    capability: tuple[int, int],
    register: str | None,
    impl: str,
) -> None:
    """`register` None: mtlaunch's own block decides, and must pass."""
    for value in ("expandable_segments:True", "expandable_segments:False"):
        env = {"PYTORCH_CUDA_ALLOC_CONF": value}
        if register is not None:
            env["NCCL_GRAPH_REGISTER"] = register
        job = plan(
            {"num-layers": 2, "cuda-graph-impl": impl},
            env=env,
            cluster={"gpu": GPU_OF[capability]},
        )
        set_block(monkeypatch, job)
        builds = builds_graph_manager if impl == "local" else builds_te_graphs
        taken = builds(capability)
        found = list(run_rules(job, select=("GRF001",)))
        assert (not [f for f in found if f.level == "error"]) == taken
        risky = value.endswith("True") and register in ("1", "")
        assert bool(found) == risky
        guarded = impl != "local" or (CORE_VERSION < (0, 19) and capability < (10, 0))
        assert taken == (not risky or not guarded)


@pytest.mark.parametrize(
    "value",
    ["expandable_segments:True", " max_split_size_mb:64 , expandable_segments : True "]
    + ["expandable_segments:true", "expandable_segments:1", "expandable_segments:", ""],
)
def test_values_agree_with_pytorch(plan: Any, value: str) -> None:
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None:
        pytest.skip("this torch has no parser that runs without CUDA")
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        parse(value)
        taken = True
    except (ValueError, RuntimeError):
        taken = False
    finally:
        parse(before)
    job = plan({"num-layers": 2}, env={"PYTORCH_CUDA_ALLOC_CONF": value})
    assert (not list(run_rules(job, select=("ENV002",)))) == taken


@pytest.mark.filterwarnings("ignore")
def test_stricter_rules_are_really_stricter(megatron_builds: Build) -> None:
    """Each listed exception is a job that Megatron takes; otherwise it hides a disagreement."""
    base = {**dict.fromkeys(("virtual", "first", "last", "layout", "mtp")), "pp": 1}
    base |= {"for_embedding": False, "for_loss": False, "num_layers": 8}
    assert megatron_builds({**base, "first": 3, "last": 8}) == [[8]]
