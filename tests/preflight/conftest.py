"""Helpers of the preflight tests, as fixtures: pytest's importlib mode has no shared modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mtlaunch.preflight import jobfile, resolve
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, run_rules

MakePlan = Callable[..., Plan]
Found = Callable[..., list[Finding]]


def make_plan(args: Mapping[str, Any] | None = None, **job: Any) -> Plan:
    """A Plan from job-file keys: `gpus` GPUs a node (8), or `slurm`; args in Megatron's words."""
    data: dict[str, Any] = {
        "slurm": {"nodes": job.pop("nodes", 1), "gpus_per_node": job.pop("gpus", 8)},
        "entrypoint": "pretrain_gpt.py",
        "args": dict(args or {}),
    }
    return resolve.resolve(jobfile.from_mapping({**data, **job}))


@pytest.fixture
def plan() -> MakePlan:
    return make_plan


@pytest.fixture
def found() -> Found:
    """Findings of a plan: `found(plan, "PIP")`, the memory verdict left out by default."""

    def run(plan: Plan, *select: str) -> list[Finding]:
        return list(run_rules(plan, select=select, ignore=() if select else ("MEM",)))

    return run


# -- parts of megatron-core that answer without a GPU ------------------------------------------


class Refused(Exception):
    """Megatron's answer to a job that it does not take."""


@pytest.fixture
def refused() -> type[Refused]:
    return Refused


@pytest.fixture
def initialize_parallel_state() -> Callable[..., None]:
    """Megatron's process groups over a fake process group, made and taken down again."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def initialize(world: int, **sizes: Any) -> None:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()

    return initialize


@pytest.fixture
def built_layers() -> Callable[[Any], list[list[int]]]:
    """Decoder layers by rank and virtual stage that a TransformerConfig builds; or Refused."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    def build(config: Any) -> list[list[int]]:
        virtual = config.virtual_pipeline_model_parallel_size
        built = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual
            )
            for rank in range(config.pipeline_model_parallel_size):
                here = functools.partial(int, rank)
                patch.setattr(parallel_state, "get_pipeline_model_parallel_rank", here)
                row = []
                for stage in range(virtual or 1):
                    try:
                        vp_stage = stage if virtual else None
                        count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=rank)
                    except AssertionError as error:
                        raise Refused(str(error)) from error
                    row.append(max(0, count))  # range() of a negative number builds nothing
                built.append(row)
        total = sum(map(sum, built))
        if total != config.num_layers:
            raise Refused(f"builds {total} layers of {config.num_layers}")
        return built

    return build


@pytest.fixture(scope="session")
def interleaving_guard() -> Callable[[int, int, int], None]:
    """The two refusals of the interleaved schedule, lifted from its source by their text."""
    import ast
    import inspect

    from megatron.core.pipeline_parallel import schedules

    source = inspect.getsource(schedules.forward_backward_pipelining_with_interleaving)
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    words = ("final_microbatch_group_size", "contiguous micro-batches")
    lifted = [node for node in function.body if any(word in ast.unparse(node) for word in words)]
    assert len(lifted) == 3
    code = compile(ast.Module(lifted, []), "schedules.py", "exec")

    def guard(pp: int, count: int, group: int) -> None:
        config = type("Config", (), {"microbatch_group_size_per_vp_stage": group})
        exec(code, {"config": config, "pipeline_parallel_size": pp, "num_microbatches": count})

    return guard
