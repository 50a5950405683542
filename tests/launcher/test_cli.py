"""The command line: exit codes, JSON documents, what is said when something is wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from mtlaunch.launcher import states
from mtlaunch.launcher.cli import cli
from mtlaunch.launcher.resolved import resolved_yaml
from mtlaunch.launcher.rundir import launch_content
from mtlaunch.launcher.runner.report import read_json
from mtlaunch.preflight.jobfile import parse
from mtlaunch.preflight.resolve import resolve

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
REFUSED = sorted((ROOT / "examples" / "refused").glob("*.yaml"))
TEMPLATE = ROOT / "templates" / "job.yaml"
MAIN = ROOT / "examples" / "tiny-lora" / "job.yaml"


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def keys(document: Any, *path: str | int) -> set[str]:
    for part in path:
        document = document[part]
    return set(document)


# -- verdicts and exit codes -----------------------------------------------------------------------


@pytest.mark.parametrize("path", [MAIN, TEMPLATE], ids=relative)
def test_a_good_job_file_is_accepted(home: Any, path: Path) -> None:
    done = home.run("check", str(path))
    assert done.code == 0
    assert "accepted" in done.out


@pytest.mark.parametrize("path", REFUSED, ids=relative)
def test_a_refused_job_says_where_and_how_to_fix_it_and_submit_leaves_nothing(
    home: Any, path: Path
) -> None:
    done = home.run("check", str(path))
    assert done.code == 1
    assert f"{path}:" in done.out
    assert "  fix: " in done.out
    assert "  more: mtlaunch explain " in done.out
    done = home.run("submit", str(path), "--executor", "local")
    assert (done.code, done.out) == (1, "")
    assert "nothing was queued" in done.err
    assert home.everything() == set()
    assert not (home.path.parent / "state").exists()


def test_a_refusal_can_be_overridden_by_its_id_which_is_recorded(home: Any) -> None:
    # a file of its own with a refusal that does not keep the script from running
    home.job("pass", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"})
    done = home.run("check", "job.yaml", "--format", "json")
    ids = {one["id"] for one in done.json["findings"] if one["severity"] == "error"}
    assert done.code == 1
    assert ids
    words = [word for one in ids for word in ("--ignore", one)]
    assert home.run("check", "job.yaml", *words).code == 0
    run = home.submit("--wait", *words)
    assert set(home.report(run)["ignored_rules"]) == ids
    assert f"# submitted with --ignore {' '.join(ids)}" in (run.path / "job.yaml").read_text()


@pytest.mark.parametrize(
    "words, said",
    [
        (["chekc"], "Did you mean 'check'"),
        (["check"], "Missing argument"),
        (["check", "job.yaml", "--fromat", "json"], "--format"),
        (["check", "no-such.yaml"], "no-such.yaml: error: cannot be read"),
        (["check", "."], "cannot be read"),
        (["check", "job.yaml", "--set", "slurm.nodes"], "KEY=VALUE"),
        (["check", "job.yaml", "--set", "slrum.nodes=2"], "did you mean 'slurm'"),
        (["explain", "PIP999"], "no rule PIP999"),
        (["report", "local-1"], "no run 'local-1'"),
        (["status", "local-1"], "no run"),
        (["logs", "local-1"], "no run"),
        (["cancel", "local-1"], "no run"),
        (["submit", "job.yaml", "--executor", "magic"], "magic"),
        (["render", "job.yaml", "--template-dir", "no-such"], "no-such"),
    ],
)
def test_wrong_use_is_exit_2_with_what_to_do(home: Any, words: list[str], said: str) -> None:
    home.job("pass")
    done = home.run(*words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_no_scheduler_is_exit_69(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home.path))
    home.job("pass")
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "slurm")
    assert (done.code, done.out) == (69, "")
    assert "--executor local" in done.err
    assert home.everything() == before


def test_without_slurm_the_executor_is_this_machine_and_it_says_why(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    home.job("pass")
    done = home.run("submit", "job.yaml", "--dry-run")
    assert (done.code, done.out) == (0, "")
    assert "executor: local, because there is no Slurm here" in done.err


def test_a_bug_is_exit_70_and_asks_for_a_report(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("mtlaunch.preflight.verdict.check", broken)
    home.job("pass")
    done = home.run("check", "job.yaml")
    assert (done.code, done.out) == (states.EXIT_BUG, "")
    assert "ZeroDivisionError: a bug" in done.err
    assert "a bug in mtlaunch" in done.err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    words = f"{sys.executable} -m mtlaunch.launcher rules | head -n 1"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_script_is_found_by_submit_and_not_by_check(home: Any) -> None:
    home.job("pass", entrypoint="gone.py")
    assert home.run("check", "job.yaml").code == 0
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "local")
    assert (done.code, done.out) == (1, "")
    assert "gone.py does not exist" in done.err
    assert home.everything() == before


def test_a_missing_secret_is_found_by_submit(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    home.job("pass", secrets=["HF_TOKEN"])
    done = home.run("submit", "job.yaml", "--executor", "local")
    assert (done.code, done.out) == (1, "")
    assert "export HF_TOKEN" in done.err


def test_a_run_directory_that_cannot_be_made_is_said_and_leaves_nothing(home: Any) -> None:
    home.job("pass")
    home.write("in-the-way", "a file")
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "local", "--runs", "in-the-way/runs")
    assert (done.code, done.out) == (2, "")
    assert "cannot make the run directory" in done.err
    assert "Not a directory" in done.err
    assert home.everything() == before


def test_a_run_directory_that_does_not_fit_on_the_disk_is_taken_back(home: Any) -> None:
    def no_space() -> None:  # as near to a full disk as a process can bring itself
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    home.job("pass")
    before = home.everything()
    done = subprocess.run(
        [sys.executable, "-m", "mtlaunch.launcher", "submit", "job.yaml", "--executor", "local"],
        capture_output=True,
        text=True,
        preexec_fn=no_space,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "File too large" in done.stderr
    assert home.everything() == before


def test_a_dry_run_leaves_nothing(home: Any) -> None:
    home.job("pass")
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "local", "-n")
    assert (done.code, done.out) == (0, "")
    assert "dry run" in done.err
    assert home.everything() == before


# -- JSON ------------------------------------------------------------------------------------------

FINDING = {"id", "name", "severity", "message", "hint", "option", "where", "source"}
ESTIMATE = set(
    "schema gpu world_size parallel ranks worst_pipeline_rank fits assumptions not_modelled".split()
)
ESTIMATE_RANK = set(
    """pipeline_rank parameters steady_bytes peak_first_step_bytes peak_bytes peak_low_bytes
    peak_high_bytes device_bytes device_low_bytes device_high_bytes components""".split()
)
REPORT = {"schema", "job", "ranks", "summary", "estimate", "attempts", "diagnosis", "first_failure"}
REPORT_RANK = set(
    """rank local_rank node gpu peak_allocated_bytes peak_reserved_bytes peak_device_bytes
    peak_host_bytes exit_code signal ended source complete""".split()
)


@pytest.mark.parametrize("path", [TEMPLATE, REFUSED[0]], ids=relative)
def test_check_json_has_the_keys_of_the_contract(home: Any, path: Path) -> None:
    done = home.run("check", str(path), "--format", "json")
    document = done.json
    assert document["schema"] == "mtlaunch.check/1"
    assert document["verdict"] == ("refused" if done.code else "accepted")
    assert keys(document) >= {"schema", "verdict", "findings", "estimate"}
    for finding in document["findings"]:
        assert set(finding) == FINDING
        assert set(finding["where"]) == {"file", "line", "column"}
        assert finding["severity"] in ("error", "warning", "info")
    assert keys(document, "estimate") >= ESTIMATE


def test_estimate_json_has_the_keys_of_the_contract(home: Any) -> None:
    document = home.run("estimate", str(TEMPLATE), "--format", "json").json
    assert document["schema"] == "mtlaunch.estimate/1"
    assert keys(document) >= ESTIMATE
    assert keys(document, "gpu") >= {"name", "capacity_bytes"}
    assert keys(document, "parallel") >= set("tp pp vpp cp ep etp dp edp".split())
    assert document["fits"] in ("yes", "tight", "no", "unknown")
    assert [rank["pipeline_rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        assert set(rank) >= ESTIMATE_RANK
        assert rank["peak_low_bytes"] <= rank["peak_bytes"] <= rank["peak_high_bytes"]
        assert rank["device_low_bytes"] <= rank["device_bytes"] <= rank["device_high_bytes"]


def test_env_json_gives_every_variable_a_reason(home: Any) -> None:
    document = home.run("env", str(TEMPLATE), "--format", "json").json
    assert document["schema"] == "mtlaunch.env/1"
    for variable in document["variables"]:
        assert set(variable) >= {"name", "value", "reason", "source", "layer"}
        assert variable["reason"]
    assert "PYTORCH_CUDA_ALLOC_CONF" in [one["name"] for one in document["variables"]]


def test_report_json_has_the_keys_of_the_contract(home: Any) -> None:
    home.job("pass")
    run = home.submit("--wait")
    document = home.report(run)
    assert document["schema"] == "mtlaunch.report/1"
    assert keys(document) >= REPORT
    assert keys(document, "job") >= set("id name state exit_code restarts elapsed_s".split())
    assert document["job"]["name"] == "probe"
    for rank in document["ranks"]:
        assert set(rank) >= REPORT_RANK
    kept = read_json(run.path / "report.json") or {}
    assert kept["ranks"] == document["ranks"]


def test_status_and_submit_speak_json(home: Any) -> None:
    home.job("pass")
    done = home.run("submit", "job.yaml", "--executor", "local", "--wait", "--format", "json")
    assert done.json["schema"] == "mtlaunch.submit/1"
    status = home.run("status", done.json["job_id"], "--format", "json").json
    assert status["schema"] == "mtlaunch.status/1"
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0)
    assert status["run_dir"] == done.json["run_dir"]


def test_several_files_give_one_document_a_line_and_the_worst_exit_code(home: Any) -> None:
    home.write("broken.yaml", "slurm: {nodes: 1\n")
    files = [str(MAIN), str(REFUSED[0]), "broken.yaml", str(TEMPLATE)]
    done = home.run("check", *files, "--format", "json")
    assert done.code == 2
    documents = [json.loads(line) for line in done.out.splitlines()]
    assert [one.get("verdict") for one in documents] == ["accepted", "refused", None, "accepted"]
    assert keys(documents[2]) == {"schema", "error"}
    assert home.run("check", *files[:2]).code == 1
    assert home.run("check", str(MAIN), str(TEMPLATE)).code == 0


@pytest.mark.parametrize("command", ["check", "estimate", "env", "submit"])
def test_an_unreadable_job_file_is_a_json_document_too(home: Any, command: str) -> None:
    home.write("broken.yaml", "entrypoint: train.py\nslurm: {nodes: 1}\nslrum: {}\nname: a b\n")
    done = home.run(command, "broken.yaml", "--format", "json")
    assert done.code == 2
    document = done.json
    assert set(document) == {"schema", "error"}
    assert document["schema"] == f"mtlaunch.{command}/1"
    lines = [problem["where"]["line"] for problem in document["error"]["problems"]]
    assert lines == [3, 4], "all problems at once, in the order of the file"


# -- the other commands ----------------------------------------------------------------------------


def test_init_writes_a_job_file_that_check_accepts(home: Any) -> None:
    assert home.run("init").code == 0
    assert home.run("check", "job.yaml").code == 0
    again = home.run("init")
    assert (again.code, "job.yaml exists" in again.err) == (2, True)
    home.write("job.yaml", "")
    assert home.run("init", "--force").code == 0
    assert home.run("check", "job.yaml").code == 0
    assert home.run("init", "no/such/folder.yaml").code == 2


def test_everything_commented_out_in_the_template_is_valid_too(home: Any) -> None:
    """Lines like `# account: research` are there to be uncommented."""
    text = TEMPLATE.read_text()
    uncommented = re.sub(r"^( *)# ?((?:  )?[a-z_]+:.*)$", r"\1\2", text, flags=re.M)
    assert uncommented.count("\nlora:") == 1
    home.write("job.yaml", uncommented)
    done = home.run("check", "job.yaml")
    assert done.code == 0, done.out + done.err


def test_the_schema_is_one_and_accepts_every_example(home: Any) -> None:
    schema = home.run("schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (*EXAMPLES, TEMPLATE):
        errors = [error.message for error in validator.iter_errors(as_an_editor_reads(path))]
        assert errors == [], path
    typed = {"env": {"A": 1, "B": True, "C": None}, "cluster": {"megatron_core": 0.19}}
    assert validator.is_valid(typed)
    broken: list[dict[str, Any]] = [
        {"slrum": {}},
        {"lora": {"dmi": 8}},
        {"launcher": "mpirun"},
        {"lora": {"dim": 0}},
    ]
    for wrong in broken:
        assert not validator.is_valid(wrong), wrong


def as_an_editor_reads(path: Path) -> Any:
    """YAML 1.2, as the language servers of editors read it, where it differs from PyYAML."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in pairs if not tag.endswith(("int", "timestamp"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?\d+$"), [*"-+0123456789"]
    )
    return yaml.load(path.read_text(), Loader=Loader)


def test_set_changes_a_value_and_says_so(home: Any) -> None:
    words = ["--set", "args.micro-batch-size=2", "--set", "slurm.nodes=8"]
    document = home.run("estimate", str(TEMPLATE), *words, "--format", "json").json
    assert document["world_size"] == 64
    wrong = home.run("check", str(TEMPLATE), "--set", "args.tensor-model-parallel-size=3")
    assert wrong.code == 1
    assert "--set args.tensor-model-parallel-size=3" in wrong.out


def test_a_dash_reads_the_job_file_from_stdin(home: Any) -> None:
    done = home.run("check", "-", stdin=TEMPLATE.read_text())
    assert (done.code, "<stdin>: accepted" in done.out) == (0, True)
    assert home.run("check", "-", stdin="nodes: 4").code == 2
    home.job("print('trained')")
    text = (home.path / "job.yaml").read_text()
    done = home.run("submit", "-", "--executor", "local", "--wait", stdin=text)
    assert done.code == 0, done.err


def test_rules_lists_what_explain_explains(home: Any) -> None:
    listed = [line.split()[0] for line in home.run("rules").out.splitlines()]
    assert listed == sorted(listed)
    assert len(listed) > 5
    for id_ in listed:
        page = home.run("explain", id_.lower())
        assert page.code == 0
        assert page.out.startswith(id_)
        assert len(page.out) > 200
        assert "Source" in page.out
    as_json = [json.loads(line) for line in home.run("rules", "--format", "json").out.splitlines()]
    assert [one["id"] for one in as_json] == listed


def test_doctor_says_what_this_machine_has(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")
    monkeypatch.setenv("PATH", str(home.path))
    document = home.run("doctor", "--format", "json").json
    assert document["schema"] == "mtlaunch.doctor/1"
    assert document["executor"] == "local"
    assert document["stripped_at_submit"] == "SBATCH_TIMELIMIT"
    assert document["runs"] == str(home.runs)
    text = home.run("doctor")
    assert (text.code, "not on PATH" in text.out) == (0, True)


def test_every_command_has_a_help_of_its_own(home: Any) -> None:
    assert home.run("--version").out.startswith("mtlaunch, version 0.")
    shown = home.run("--help")
    assert "Exit codes" in shown.out
    context = click.Context(cli)
    for name in cli.list_commands(context):
        done = home.run(name, "--help")
        command = cli.get_command(context, name)
        assert command is not None
        assert done.code == 0
        assert name in shown.out
        assert command.help
        assert command.help.splitlines()[0] in done.out.replace("\n  ", " ")


# -- the run directory's job file ------------------------------------------------------------------


@pytest.mark.parametrize("path", [TEMPLATE, MAIN], ids=relative)
def test_the_resolved_job_file_launches_the_same(home: Any, path: Path) -> None:
    changes = ["args.lr=1e-4", "slurm.time=00:30:00", "env.NOTE='a: b # c'", "slurm.comment=é"]
    job = parse(path.read_text(), str(path), changes)
    plan = resolve(job)
    text = resolved_yaml(job, plan, "/work")
    again = resolve(parse(text, "resolved.yaml"))
    assert launch_content(again) == launch_content(plan)
    assert dict(again.slurm) == dict(plan.slurm)
    assert again.workdir == "/work"
    assert "lr: 1e-4  # --set args.lr=1e-4" in text
    assert f"# {path}:" in text
    home.write("resolved.yaml", text)
    first = home.run("check", str(path), "--format", "json").json
    second = home.run("check", "resolved.yaml", "--format", "json").json
    for document in (first, second):
        document.pop("file")
        for finding in document["findings"]:
            finding.pop("where")
    assert second == first


def test_the_job_file_of_a_run_directory_can_be_submitted_again(home: Any) -> None:
    nasty = {"lr": 0.001, "text": "a: b # c", "list": ["x, y", 1e-5, 3], "flag": True, "off": False}
    home.job("import sys; print(sys.argv)", args=nasty, extra_args=["line\nbreak"])
    run = home.submit("--wait")
    done = home.run("submit", str(run.path / "job.yaml"), "--executor", "local", "--wait")
    assert done.code == 0, done.err
    first = read_json(run.path / "payload" / "launch.json")
    [other] = [path for path in home.run_dirs() if path != run.path]
    assert read_json(other / "payload" / "launch.json") == first


def test_the_index_survives_lines_that_are_not_its_own(home: Any, tmp_path: Path) -> None:
    home.job("pass")
    run = home.submit("--wait")
    index = tmp_path / "state" / "mtlaunch" / "index.jsonl"
    index.write_text(index.read_text() + "torn {\n[1]\n" + json.dumps({"job_id": "9"}) + "\n")
    assert home.run("status", "probe").code == 0
    assert home.run("status", "9").code == 2
    index.unlink()
    assert home.run("status", str(run.path)).code == 0


def test_json_goes_to_stdout_alone_even_from_a_new_process(home: Any) -> None:
    home.job("pass")
    done = subprocess.run(
        [sys.executable, "-m", "mtlaunch.launcher", "check", "job.yaml", "--format", "json"],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"] == "accepted"


@pytest.mark.parametrize(
    "words, code, schema",
    [
        (("report", "nowhere"), 2, "mtlaunch.report/1"),
        (("status", "nowhere"), 2, "mtlaunch.status/1"),
        (("estimate", "nowhere.yaml"), 2, "mtlaunch.estimate/1"),
        (("submit", "job.yaml", "--executor", "slurm"), 69, "mtlaunch.submit/1"),
        (("submit", "job.yaml", "--set", "entrypoint=gone.py"), 1, "mtlaunch.submit/1"),
    ],
)
def test_every_error_is_a_document_with_format_json(
    home: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, schema: str
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm, whatever this machine has
    home.job("print(1)")
    done = home.run(*words, "--format", "json")
    assert done.code == code
    assert set(done.json) == {"schema", "error"}
    assert done.json["schema"] == schema and done.json["error"]["message"]


def test_a_folder_that_was_there_stays_when_a_submission_fails(home: Any) -> None:
    home.runs.mkdir()
    home.job("print(1)", slurm={"nodes": 2})
    assert home.run("submit", "job.yaml", "--executor", "local").code == 69
    assert home.runs.is_dir() and list(home.runs.iterdir()) == []


def test_a_dry_run_is_a_document_with_format_json(home: Any) -> None:
    home.job("pass")
    document = home.run("submit", "job.yaml", "--executor", "local", "-n", "--format", "json").json
    assert set(document) == {"schema", "dry_run", "executor", "run_dir"}
    assert (document["schema"], document["dry_run"]) == ("mtlaunch.submit/1", True)
    assert document["executor"] == "local"
    assert document["run_dir"].startswith(str(home.runs / "probe"))


@pytest.mark.parametrize(
    "words, schema, said",
    [
        (["check", "job.yaml", "--fromat", "x", "--format", "json"], "check", "--fromat"),
        (["check", "--format=json"], "check", "JOB"),
        (["submit", "job.yaml", "--format=json", "--executor", "magic"], "submit", "magic"),
        (["report", "--format", "json", "1", "2"], "report", "unexpected extra argument"),
        (["chekc", "job.yaml", "--format", "json"], "error", "check"),
    ],
)
def test_wrong_use_is_a_document_with_format_json(
    home: Any, words: list[str], schema: str, said: str
) -> None:
    home.job("pass")
    done = home.run(*words)
    assert (done.code, done.err) == (2, "")
    assert set(done.json) == {"schema", "error"}
    assert done.json["schema"] == f"mtlaunch.{schema}/1"
    assert said in done.json["error"]["message"]


# -- rule ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["PIP", "mem"])
def test_submit_ignores_no_families(home: Any, family: str) -> None:
    home.job("pass")
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "local", "--ignore", family)
    assert (done.code, done.out) == (2, "")
    assert f"{family.upper()} is a family" in done.err
    listed = [line.split()[0] for line in home.run("rules").out.splitlines()]
    members = [one for one in listed if one.startswith(family.upper())]
    assert members and all(f"--ignore {one}" in done.err for one in members)
    assert home.everything() == before


def test_rule_ids_are_taken_in_any_case(home: Any) -> None:
    home.job("pass", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"})
    [id_] = [
        one["id"]
        for one in home.run("check", "job.yaml", "--format", "json").json["findings"]
        if one["severity"] == "error"
    ]
    for word in (id_.lower(), id_[:3].lower()):
        assert home.run("check", "job.yaml", "--ignore", word).code == 0
        assert home.run("check", "job.yaml", "--select", word).code == 1
    run = home.submit("--wait", "--ignore", id_.lower())
    assert home.report(run)["ignored_rules"] == [id_]


@pytest.mark.parametrize(
    "words, near",
    [
        (["check", "job.yaml", "--ignore", "PIP0001"], "PIP001"),
        (["check", "job.yaml", "--select", "MEMO"], "MEM"),
        (["check", "job.yaml", "--ignore", "?"], "mtlaunch rules"),
        (["submit", "job.yaml", "--executor", "local", "--ignore", "EN001"], "ENV001"),
    ],
)
def test_an_unknown_rule_id_is_exit_2_with_what_was_meant(
    home: Any, words: list[str], near: str
) -> None:
    home.job("pass")
    done = home.run(*words)
    assert (done.code, done.out) == (2, "")
    assert f"no rule {words[-1]}" in done.err
    assert near in done.err
    document = home.run(*words, "--format", "json").json
    assert document["schema"] == f"mtlaunch.{words[0]}/1"
    assert near in document["error"]["hint"]


# -- a model that is not known ---------------------------------------------------------------------


def test_a_job_without_a_known_model_has_an_unknown_fit(home: Any) -> None:
    home.job("pass", cluster={"gpu": "H100-80GB"})
    sentence = "memory: fits: unknown (the model's shape is not known)\n"
    assert sentence in home.run("check", "job.yaml").out
    done = home.run("estimate", "job.yaml")
    assert (done.code, done.out) == (0, sentence)
    assert "give model:" in done.err
    done = home.run("estimate", "job.yaml", "--format", "json")
    document = done.json
    assert done.code == 0
    assert keys(document) == ESTIMATE
    assert keys(document, "parallel") == set("tp pp vpp cp ep etp dp edp".split())
    assert (document["fits"], document["ranks"]) == ("unknown", [])
    assert document["world_size"] == 2
    assert document["gpu"]["name"] == "H100-80GB"
    assert document["not_modelled"] == ["the model's shape is not known"]
    home.job("pass")
    assert home.run("estimate", "job.yaml", "--format", "json").json["gpu"] is None
