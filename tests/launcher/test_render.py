"""The job script: what shellcheck says, what arrives at the ranks, what a template can do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mtlaunch.launcher.local_job import directives
from mtlaunch.launcher.render import RenderError, quoted, render, sbatch_value
from mtlaunch.preflight.jobfile import parse
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.resolve import resolve

ROOT = Path(__file__).parents[2]

# Executed by a shell that takes one of these as text of its own, this leaves a file.
CANARY = "touch canary"

NASTY = {
    "SPACES": "  a  b ",
    "DOUBLE": 'say "hi"',
    "SINGLE": "it's 'so'",
    "BOTH": """'"'"'\\""",
    "SUBSTITUTION": f"$({CANARY})",
    "BACKTICKS": f"`{CANARY}`",
    "SEMICOLON": f"x; {CANARY}; #",
    "BREAKOUT": f"'; {CANARY}; '",
    "VARIABLE": "$HOME ${PATH} $$",
    "COMMAS": "a,b,,c",
    "HASH": "# not a comment",
    "PERCENT": "100% %j %x",
    "BACKSLASH": "\\n\\t\\",
    "GLOB": "* ? [a-z] ~ {a,b} !x",
    "UNICODE": "Grüße 漢字 🚀 \u2028 \u00a0",
    "CONTROL": "tab\there, \x1b[31mred, \x7f",
    "EMPTY": "",
    "JINJA": "{{ plan.name }} {% raw %} {# x #}",
    "LONG": "x'" * 50_000,
}


def plan_of(**content: Any) -> Plan:
    job = {
        "name": "probe",
        "slurm": {"ntasks_per_node": 2},
        "entrypoint": "train.py",
        **content,
    }
    return resolve(parse(yaml.safe_dump(job, sort_keys=False), "job.yaml"))


def assert_clean(script: str, folder: Path) -> None:
    """bash and shellcheck have nothing to say about a script."""
    path = folder / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    assert script.startswith("#!/bin/bash\n")
    syntax = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (syntax.returncode, syntax.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert checked.stdout == ""


# -- the text --------------------------------------------------------------------------------------

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
JOB_FILES = [*EXAMPLES, ROOT / "templates" / "job.yaml"]

VARIANTS: dict[str, dict[str, Any]] = {
    "torchrun": {"launcher": "torchrun", "slurm": {"nodes": 4, "gpus_per_node": 8}},
    "setup": {"setup": ["module load cuda/12.9", 'export A="b c"; export D=e', "umask 007"]},
    # shellcheck takes minutes for the long one
    "nasty values": {"env": {name: value[:500] for name, value in NASTY.items()}},
    "nasty options": {
        "slurm": {"ntasks_per_node": 1, "comment": 'say "x" $(y) ; z', "exclusive": True}
    },
    "warned": {"facts": {"checkpoint_seconds": 180}},
    "nasty name": {"name": "a.b-c_d", "python": "my python", "workdir": "a 'dir'"},
    "module": {"entrypoint": {"module": "trainer.main"}},
}


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_script_of_every_job_file_is_clean(home: Any, path: Path) -> None:
    done = home.run("render", str(path))
    assert done.code == 0, done.err
    assert_clean(done.out, home.path)


@pytest.mark.parametrize("content", VARIANTS.values(), ids=VARIANTS)
def test_the_script_of_every_variant_is_clean(home: Any, content: dict[str, Any]) -> None:
    assert_clean(render(plan_of(**content), "/runs/a 'b'/%j $x/1", "/work"), home.path)


def test_options_come_through_and_those_of_the_run_directory_are_added() -> None:
    slurm = {
        "nodes": 2,
        "gpus_per_node": 8,
        "time": "04:00:00",
        "account": "a b",
        "exclusive": True,
    }
    script = render(plan_of(slurm=slurm), "/runs/100%/r", "/work")
    assert directives(script) == {
        "job-name": "probe",
        "nodes": "2",
        "gpus-per-node": "8",
        "time": "04:00:00",
        "account": "a b",
        "exclusive": "",
        "ntasks-per-node": "8",
        "no-requeue": "",
        "output": "/runs/100%%/r/logs/%j.log",
        "open-mode": "append",
    }
    assert "--nodes=2 --ntasks=16 --ntasks-per-node=8" in script


def test_torchrun_gets_one_task_a_node() -> None:
    slurm = {"nodes": 2, "gpus_per_node": 8}
    script = render(plan_of(slurm=slurm, launcher="torchrun"), "/runs/r", "/work")
    assert directives(script)["ntasks-per-node"] == "1"
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in script
    assert "torch.distributed.run --nnodes=2 --nproc-per-node=8" in script


def test_a_known_checkpoint_time_sets_the_warning_before_the_limit() -> None:
    script = render(plan_of(facts={"checkpoint_seconds": 180}), "/runs/r", "/work")
    assert directives(script)["signal"] == "B:USR1@240"
    own = {"ntasks_per_node": 2, "signal": "B:USR1@99"}
    script = render(plan_of(facts={"checkpoint_seconds": 180}, slurm=own), "/runs/r", "/work")
    assert directives(script)["signal"] == "B:USR1@99"


def test_rendering_twice_gives_the_same_text() -> None:
    plan = plan_of(env=NASTY)
    assert render(plan, "/runs/r", "/work") == render(plan, "/runs/r", "/work")


def test_render_touches_nothing_and_needs_no_slurm(home: Any, monkeypatch: Any) -> None:
    home.job("pass")
    before = home.everything()
    empty = home.path.parent / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    for words in (["render", "job.yaml"], ["check", "job.yaml"], ["env", "job.yaml"]):
        assert home.run(*words).code == 0
    assert home.everything() == before
    assert list(empty.iterdir()) == []
    assert not (home.path.parent / "state").exists()


# -- what arrives ----------------------------------------------------------------------------------


def test_every_value_arrives_byte_for_byte_and_nothing_executes(home: Any) -> None:
    home.job(
        """\
import json, os, sys
if os.environ["RANK"] == "1":
    shown = {"env": {n: v for n, v in os.environ.items() if n.startswith("V_")}, "argv": sys.argv}
    with open("shown.json", "w") as file:
        json.dump(shown, file)
""",
        env={f"V_{name}": value for name, value in NASTY.items()},
        args={"text": NASTY["LONG"], "list": [*NASTY.values()], "empty": ""},
        extra_args=[*NASTY.values(), "line\nbreak"],
        slurm={"comment": NASTY["SUBSTITUTION"]},
    )
    code, _, done = home.submit_and_wait()
    assert code == 0, done.err
    shown = json.loads((home.path / "shown.json").read_text())
    assert shown["env"] == {f"V_{name}": value for name, value in NASTY.items()}
    values = list(NASTY.values())
    assert shown["argv"] == [
        "train.py",
        *("--text", NASTY["LONG"]),
        *("--list", *values),
        *("--empty", ""),
        *values,
        "line\nbreak",
    ]
    assert not list(home.path.parent.rglob("canary"))


def test_names_that_a_shell_would_execute_are_carried_as_well(
    home: Any, log: Callable[..., str]
) -> None:
    """Of the folder, the job file and the script."""
    folder = home.path / f"a 'b' $({CANARY}) é"
    folder.mkdir()
    (folder / f"$({CANARY}).py").write_text("import os; print('in', os.getcwd())")
    job = {"slurm": {"ntasks_per_node": 1, "time": 5}, "entrypoint": f"$({CANARY}).py"}
    (folder / f"x\n{CANARY}\n.yaml").write_text(json.dumps(job))
    words = ["submit", str(folder / f"x\n{CANARY}\n.yaml"), "--executor", "local", "--wait"]
    done = home.run(*words, "--runs", str(folder / "runs %j"))
    assert done.code == 0, done.err
    [text] = (folder / "runs %j").glob("*/2*/logs/[0-9]*.log")
    assert f"in {folder}" in text.read_text()
    assert not list(home.path.parent.rglob("canary"))


def test_variables_of_the_user_do_not_collide_with_the_scripts_own(
    home: Any, log: Callable[..., str], monkeypatch: Any
) -> None:
    env = {"RUN_DIR": "/data/run", "PYTHON": "/usr/bin/python9", "RUNNER": "fast"}
    monkeypatch.setenv("CODE", "from the shell")
    home.job(f"import os; print([os.environ[n] for n in {[*env, 'CODE']}])", env=env)
    code, run, done = home.submit_and_wait()
    assert code == 0, done.err
    assert log(run).count(str([*env.values(), "from the shell"])) == 2


def test_a_variable_of_the_shell_that_the_block_decides_does_not_come_back(
    home: Any, log: Callable[..., str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("NCCL_CTA_POLICY", "1")
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("RANK", "7")
    home.job("import os; print('NCCL_CTA_POLICY' in os.environ, os.environ['WORLD_SIZE'])")
    code, run, done = home.submit_and_wait()
    assert code == 0, done.err
    assert log(run).count("False 2") == 2


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=40))
def test_any_text_survives_the_shell_and_the_directive_line(text: str) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"printf %s {quoted(text)}"], capture_output=True, check=True
    )
    assert shown.stdout == text.encode()
    try:
        value = sbatch_value(text)
    except RenderError:
        assert '"' in text or "\\" in text
        assert "'" in text
        return
    assert directives(f"#SBATCH --comment={value}") == {"comment": text}


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_a_line_break_is_refused_with_the_key_named(home: Any, line_break: str) -> None:
    value = f"a{line_break}{CANARY}"
    for content, key in (
        ({"env": {"NOTE": value}}, "env.NOTE"),
        ({"cluster": {"env": {"NOTE": value}}}, "NOTE"),
        ({"slurm": {"comment": value}}, "slurm.comment"),
    ):
        home.job("pass", **content)
        for words in (["render"], ["submit", "--executor", "local"]):
            done = home.run(*words, "job.yaml")
            assert (done.code, done.out) == (2, ""), content
            assert key in done.err
            assert "line break" in done.err
    assert home.run_dirs() == []


def test_an_option_name_that_is_none_is_refused(home: Any) -> None:
    home.job("pass", slurm={f"x\n{CANARY}\n#": "1"})
    done = home.run("render", "job.yaml")
    assert (done.code, done.out) == (2, "")


# -- templates -------------------------------------------------------------------------------------


def with_template(home: Any, text: str, name: str = "job.sbatch.j2") -> Any:
    (home.path / "own").mkdir(exist_ok=True)
    home.write(f"own/{name}", text)
    return home.run("render", "job.yaml", "--template-dir", "own")


def test_an_own_template_wins_over_the_built_in_one(home: Any) -> None:
    home.job("pass")
    done = with_template(home, "#!/bin/bash\n# {{ plan.name }} on {{ plan.nodes }}\n")
    assert (done.code, done.out) == (0, "#!/bin/bash\n# probe on 1\n")


def test_an_own_template_can_extend_the_built_in_one(home: Any, log: Callable[..., str]) -> None:
    home.job("pass")
    text = """\
{% extends "builtin/job.sbatch.j2" %}
{% block environment %}
{{ super() }}
echo "site block ran"
{% endblock %}
"""
    done = with_template(home, text)
    plain = home.run("render", "job.yaml")
    assert done.code == 0, done.err
    assert_clean(done.out, home.path)
    kept = [line for line in done.out.splitlines() if line and "site block" not in line]
    assert kept == [line for line in plain.out.splitlines() if line]
    run = home.submit("--template-dir", "own", "--wait")
    assert "site block ran" in log(run)


def test_templates_with_dos_line_ends_give_a_unix_script(home: Any) -> None:
    home.job("pass")
    assert "\r" not in with_template(home, "#!/bin/bash\r\necho\r\n").out


@pytest.mark.parametrize(
    "text, said",
    [
        ("#!/bin/bash\n{{ no_such_value }}\n", r"own/job\.sbatch\.j2:2: 'no_such_value' is undef"),
        ("#!/bin/bash\n\n{{ plan.no_such }}\n", r"own/job\.sbatch\.j2:3: .*no_such"),
        ("#!/bin/bash\n{% if x %}\n", r"own/job\.sbatch\.j2:\d: "),
        ("#!/bin/bash\n{{ 1 + 'a' }}\n", r"own/job\.sbatch\.j2:2: "),
        ("{% include 'no_such.j2' %}", r"no_such\.j2: not found"),
        ("{% extends 'builtin/job.sbatch.j2' %}{% block setup %}{{ x }}{% endblock %}", "'x'"),
    ],
    ids=["undefined", "undefined attribute", "syntax", "type", "missing", "in a block"],
)
def test_an_error_in_a_template_names_it_and_is_exit_2(home: Any, text: str, said: str) -> None:
    home.job("pass")
    done = with_template(home, text)
    assert (done.code, done.out) == (2, "")
    assert re.search(said, done.err), done.err
    done = home.run("submit", "job.yaml", "--executor", "local", "--template-dir", "own")
    assert (done.code, done.out, home.run_dirs()) == (2, "", [])


def test_the_script_runs_without_any_mtlaunch_installed(home: Any, log: Callable[..., str]) -> None:
    """Its ranks and its epilog import from the payload only."""
    home.job("print('trained')")
    run = home.submit("--wait")
    (home.path / "fake").mkdir()
    (home.path / "fake" / "mtlaunch.py").write_text("raise SystemExit('an installed mtlaunch')")
    tools = {"srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"', "scancel": ":"}
    for name, text in tools.items():
        home.write(f"fake/{name}", f"#!/bin/bash\n{text}\n")
        (home.path / "fake" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(run.script)],
        env={
            "PATH": f"{home.path}/fake:{os.environ['PATH']}",
            "PYTHONPATH": str(home.path / "fake"),
            "SLURM_JOB_ID": "42",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_RESTART_COUNT": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "rank 0 at" in done.stdout
    report = json.loads((run.path / "report.json").read_text())
    assert [one["attempt"] for one in report["attempts"]] == [0, 1]
    assert sys.executable in run.script.read_text()
