"""Job files as people write them: YAML facts, all errors at once, --set."""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec
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


# -- what is told of a wrong value ---------------------------------------------------------------

EVERYTHING_WRONG = """\
name: -x
launcher: slurm
cluster:
  gpus: H100-80GB
  node_ram_gb: 0
  torch: new
  env: {1A: x, B: [y]}
entrypoint: {modul: a.b}
setup: [a, [b]]
lora:
  dim: 0
  alpha: .nan
  dropout: 1e0
  target_modules: []
  sequence_parallel: all
secrets: [TOKEN, 1B]
container: {runtime: docker, mounts: {a: b}}
facts:
  restartable: maybe
  colocated: {engin: vllm, version: x, sleep_mode: 3}
env:
"""


def test_every_wrong_value_is_told_with_its_place() -> None:
    found = problems(EVERYTHING_WRONG)
    assert [f"{p.place.line}:{p.place.column} {p.message}" for p in found] == [
        "1:7 name: expected a letter or digit, then up to 99 letters, digits, '.', '_' or '-', "
        "got '-x'",
        "2:11 launcher: expected srun or torchrun, got 'slurm'",
        "4:3 unknown key 'cluster.gpus'",
        "5:16 cluster.node_ram_gb: expected above 0, got 0",
        "6:10 cluster.torch: expected a version such as 0.19, got 'new'",
        "7:9 cluster.env.1A: expected a variable's name of letters, digits and _, got '1A'",
        "7:19 cluster.env.B: expected text, got a list",
        "8:13 entrypoint.module: missing, expected text",
        "8:14 unknown key 'entrypoint.modul'",
        "9:12 setup.1: expected text, got a list",
        "11:8 lora.dim: expected at least 1, got 0",
        "12:10 lora.alpha: expected above 0, got .nan",
        "13:12 lora.dropout: expected at least 0 and below 1, got 1e0",
        "14:19 lora.target_modules: expected one or more names of modules, got an empty list",
        "15:22 lora.sequence_parallel: expected base, regather or gather-free, got 'all'",
        "16:18 secrets.1: expected a variable's name of letters, digits and _, got '1B'",
        "17:12 container.image: missing, expected text",
        "17:22 container.runtime: expected pyxis or apptainer, got 'docker'",
        "17:38 container.mounts: expected text or a list, got a mapping",
        "19:16 facts.restartable: expected true or false, got 'maybe'",
        "20:14 facts.colocated.engine: missing, expected text",
        "20:15 unknown key 'facts.colocated.engin'",
        "20:37 facts.colocated.version: expected a version such as 0.19, got 'x'",
        "20:52 facts.colocated.sleep_mode: expected true or false, got 3",
        "21:5 env: expected a mapping, got nothing",
    ]
    hints = {p.message: p.hint for p in found if p.hint}
    assert hints == {
        "unknown key 'cluster.gpus'": "did you mean 'gpu'?",
        "unknown key 'entrypoint.modul'": "did you mean 'module'?",
        "unknown key 'facts.colocated.engin'": "did you mean 'engine'?",
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("entrypoint: [a.py]", "entrypoint: expected text or a mapping, got a list"),
        ("entrypoint: {module: [a]}", "entrypoint.module: expected text, got a list"),
        ("model: 7", "model: expected text or a mapping, got 7"),
        ("model: {hf_config: 7}", "model.hf_config: expected text, got 7"),
        ("cluster:", "cluster: expected text or a mapping, got nothing"),
        ("cluster: {torch: [2]}", "cluster.torch: expected a version such as 0.19, got a list"),
        ("lora: [dim]", "lora: expected a mapping, got a list"),
        (
            "slurm: {time: {a: b}}",
            "slurm.time: expected text, a number, true, false or a list, got a mapping",
        ),
        ("slurm: {mail-type: [END, [FAIL]]}", "slurm.mail-type.1: expected text, got a list"),
        ("args: [a]", "args: expected a mapping, got a list"),
        ("secrets: TOKEN", "secrets: expected a list, got 'TOKEN'"),
        ("lora: {dim: }", "lora.dim: expected a whole number, got nothing"),
        ("lora: {dim: 1.5}", "lora.dim: expected a whole number, got 1.5"),
        ("lora: {dim: yes}", "lora.dim: expected a whole number, got yes"),
        ("lora: {dropout: -1e-3}", "lora.dropout: expected at least 0 and below 1, got -1e-3"),
        ("cluster: {node_ram_gb: 'null'}", "cluster.node_ram_gb: expected a number, got 'null'"),
    ],
)
def test_of_a_union_the_member_that_was_meant_complains(text: str, message: str) -> None:
    assert [problem.message for problem in problems(text)] == [message]


@pytest.mark.parametrize(
    "text", ['name: "a\\n"', 'cluster: {nccl: "2.1\\n"}', 'env: {"A\\n": 1}', 'secrets: ["A\\n"]']
)
def test_a_last_line_break_does_not_pass(text: str) -> None:
    [problem] = problems(text)
    assert "expected" in problem.message


def test_a_lone_text_is_a_list_of_one() -> None:
    read = content(
        "setup: module load x\n"
        "lora: {target_modules: linear_qkv}\n"
        "container: {runtime: pyxis, image: a, mounts: /a:/b}\n"
    )
    assert read.setup == ["module load x"]
    assert read.lora is not None and read.lora.target_modules == ["linear_qkv"]
    assert read.container is not None and read.container.mounts == ["/a:/b"]


def test_numbers_are_taken_as_their_field_wants_them() -> None:
    read = content(
        "lora: {dim: '8', alpha: 16}\n"
        "cluster: {node_ram_gb: '512'}\n"
        "name: 012\n"
        "facts: {colocated: {engine: vllm, version: 0.10}}\n"
    )
    assert read.lora is not None and (read.lora.dim, read.lora.alpha) == (8, 16.0)
    assert isinstance(read.cluster, jobfile.Cluster) and read.cluster.node_ram_gb == 512
    assert read.name == "012"
    assert msgspec.to_builtins(read.facts) == {"colocated": {"engine": "vllm", "version": "0.10"}}


# -- the JSON Schema -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {"setup": "module load x"},
        {"lora": {"target_modules": "linear_qkv"}},
        {"container": {"runtime": "pyxis", "image": "a", "mounts": "/a:/b"}},
        {"setup": ["a", "b"], "lora": {"target_modules": ["a"]}},
        {"env": {"A": 1, "B": True, "C": None, "D": "x"}, "cluster": {"env": {"A": 0.5}}},
        {"cluster": {"megatron_core": 0.19, "torch": "2.10.0a0"}},
        {"cluster": "h100", "entrypoint": {"module": "a.b"}, "model": {"hf_config": "c.json"}},
        {"slurm": {"nodes": 2, "exclusive": True, "mail-type": ["END"]}, "lora": None},
    ],
)
def test_the_schema_accepts_what_is_read(data: dict[str, Any]) -> None:
    schema = jobfile.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema, jsonschema.Draft202012Validator)
    assert jobfile.from_mapping(data)


@pytest.mark.parametrize(
    "data",
    [
        {"entrypiont": "a.py"},
        {"lora": {"dims": 8}},
        {"lora": {"dim": 0}},
        {"lora": {"dropout": 1}},
        {"lora": {"target_modules": []}},
        {"setup": ["a", ["b"]]},
        {"setup": {"a": "b"}},
        {"secrets": "TOKEN"},
        {"launcher": "slurm"},
        {"env": {"1A": "x"}},
        {"cluster": {"torch": "new"}},
        {"container": {"runtime": "pyxis"}},
        {"facts": {"colocated": {"version": "1"}}},
        {"name": "a b"},
    ],
)
def test_the_schema_refuses_what_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, jobfile.json_schema(), jsonschema.Draft202012Validator)
    with pytest.raises(JobFileError):
        jobfile.from_mapping(data)


def test_every_mapping_of_the_schema_is_closed_and_speaks() -> None:
    schema = jobfile.json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    shapes = [schema, *schema["$defs"].values()]
    assert all(shape["additionalProperties"] is False for shape in shapes)
    assert {"lora", "container", "facts"} <= set(schema["properties"])
    assert schema["properties"]["setup"]["type"] == ["string", "array"]
    assert schema["properties"]["model"]["description"] == "a known shape; args win over it"
    assert schema["$defs"]["Facts"]["description"].startswith("What only the user can know")
    assert "x-types" not in str(schema) and r"\Z" not in str(schema)
