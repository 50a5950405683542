"""Job files as people write them: YAML facts, all errors at once, --set."""

from __future__ import annotations

from typing import Any

import pytest

from mtlaunch.preflight import jobfile
from mtlaunch.preflight.yaml_text import JobFileError, Problem


def problems(text: str, *assignments: str) -> list[Problem]:
    with pytest.raises(JobFileError) as caught:
        jobfile.parse(text, "job.yaml", assignments)
    return caught.value.problems


def content(text: str, *assignments: str) -> jobfile.JobFile:
    return jobfile.parse(text, "job.yaml", assignments).content


@pytest.mark.parametrize("time", ["04:00:00", '"04:00:00"', "'04:00:00'"])
def test_times_are_no_base_60_numbers(time: str) -> None:
    assert content(f"slurm: {{time: {time}}}").slurm["time"] == "04:00:00"


@pytest.mark.parametrize(
    "written, value",
    [
        ("1e3", 1000.0),
        ("1.0e-4", 1e-4),
        ("012", 12),
        ("1_000", 1000),
        ("no", False),
        ("on", True),
        ("'no'", "no"),
        ("~", None),
        ("4", 4),
        ("M-M*", "M-M*"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_scalars_of_args(written: str, value: Any) -> None:
    assert content(f"args: {{x: {written}}}").args["x"] == value


@pytest.mark.parametrize("written", ["012", "1e3", "no", "True", "0x10", "1_0", "04:00", "0.20"])
def test_environment_values_stay_as_typed(written: str) -> None:
    assert content(f"env: {{A: {written}}}").env["A"] == written


def test_versions_stay_as_typed() -> None:
    assert content("cluster: {megatron_core: 0.20, torch: 2}").cluster.megatron_core == "0.20"


def test_an_empty_variable() -> None:
    assert content("env: {A: }").env == {"A": ""}


def test_duplicate_keys() -> None:
    [problem] = problems("args:\n  num-layers: 4\n  num-layers: 8\n")
    assert problem.message == "duplicate key 'num-layers' (first on line 2)"
    assert (problem.place.line, problem.place.column) == (3, 3)


def test_one_flag_in_two_spellings() -> None:
    [problem] = problems("args:\n  num-layers: 4\n  num_layers: 8\n")
    assert problem.message == "args.num_layers is the same option as args.num-layers"


@pytest.mark.parametrize(
    "text, message, hint",
    [
        ("entrypiont: a.py", "unknown key 'entrypiont'", "did you mean 'entrypoint'?"),
        ("lora: {dims: 8}", "unknown key 'lora.dims'", "did you mean 'dim'?"),
        ("cluster: {gpus: x}", "unknown key 'cluster.gpus'", "did you mean 'gpu'?"),
        ("slurm: {partion: x}", "sbatch has no option --partion", "did you mean 'partition'?"),
    ],
)
def test_did_you_mean(text: str, message: str, hint: str) -> None:
    [problem] = problems(text)
    assert (problem.message, problem.hint) == (message, hint)


def test_all_errors_at_once_in_the_order_of_the_file() -> None:
    text = (
        "slurm: {nodes: 1, output: x.log}\n"
        "launcher: mpirun\n"
        "lora: {dim: -1, sequence_parallel: all}\n"
        "entrypiont: a.py\n"
        "sweep: {}\n"
    )
    found = problems(text)
    assert [problem.place.line for problem in found] == [1, 2, 3, 3, 4, 5]
    assert found[0].hint == "logs go to the run directory"


@pytest.mark.parametrize(
    "text",
    ["a: [1, 2", "a: b: c", "\ta: 1", "- 1\n- 2", "just words", "a: !!python/name:os.system"],
)
def test_what_is_no_job_file(text: str) -> None:
    [problem] = problems(text)
    assert problem.place.line >= 1


def test_set_replaces_and_adds() -> None:
    text = "slurm: {nodes: 1}\nargs: {num-layers: 4}\n"
    read = content(
        text, "slurm.nodes=8", "args.num_layers=12", "args.ddp.nccl_ub=true", "env.A=012", "name=x"
    )
    assert read.slurm["nodes"] == "8"
    assert read.args == {"num-layers": 12, "ddp.nccl_ub": True}
    assert read.env == {"A": "012"}
    assert read.name == "x"


def test_set_has_its_own_place() -> None:
    [problem] = problems("slurm: {nodes: 1}", "launcher=mpirun")
    assert str(problem.place) == "--set launcher=mpirun"
    [problem] = problems("slurm: {nodes: 1}", "slurm.nodes")
    assert problem.message == "--set wants KEY=VALUE, got 'slurm.nodes'"


def test_name_defaults_to_the_file() -> None:
    assert jobfile.parse("", "jobs/llama 3.yaml").name == "llama-3"
