"""The layers of DESIGN: who may import whom, what a login node loads, what a wheel ships."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "preflight", "kernels", "templates")
LOGIN_NODE = {"click", "yaml", "jinja2", "msgspec", "rich", "submitit", "pynvml"}

# Heavy, or there only in a training environment.
NEVER_ON_CHECK = ("torch", "numpy", "submitit", "rich", "jinja2", "megatron", "pynvml")


@dataclass(frozen=True)
class Import:
    """One imported module: where, which, and whether the import runs with the module itself."""

    file: str
    line: int
    module: str
    at_top: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("mtlaunch", *(part for part in parts if part != "__init__")))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, those in functions and under TYPE_CHECKING too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(outer)
    }
    file = str(path.relative_to(ROOT))
    for node in ast.walk(tree):
        at_top = id(node) not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are written in full"
            module = node.module or ""
            yield Import(file, node.lineno, module, at_top)
            if module == "mtlaunch" or module.startswith("mtlaunch."):
                for alias in node.names:  # `from mtlaunch import kernels`
                    yield Import(file, node.lineno, f"{module}.{alias.name}", at_top)


def imports(folder: str) -> list[Import]:
    found = [one for path in python_files(folder) for one in imports_of(path)]
    assert found, f"no imports in {folder}: is this the right folder?"
    return found


def within(one: Import, *packages: str) -> bool:
    return any(one.module == name or one.module.startswith(f"{name}.") for name in packages)


def others(*packages: str) -> tuple[str, ...]:
    return tuple(f"mtlaunch.{name}" for name in packages)


def assert_none(wrong: list[Import]) -> None:
    assert wrong == [], "\n".join(map(str, wrong))


# -- who imports whom ------------------------------------------------------------------------------


def test_preflight_imports_nothing_of_the_others() -> None:
    forbidden = others("launcher", "kernels", "templates")
    assert_none([one for one in imports("preflight") if within(one, *forbidden)])


def test_preflight_needs_no_more_than_yaml_and_msgspec() -> None:
    known = sys.stdlib_module_names | {"mtlaunch", "yaml", "msgspec"}
    assert_none([one for one in imports("preflight") if one.root not in known])


def test_kernels_import_nothing_of_the_others() -> None:
    forbidden = others("launcher", "preflight", "templates")
    assert_none([one for one in imports("kernels") if within(one, *forbidden)])


def test_kernels_need_no_more_than_the_training_environment() -> None:
    known = sys.stdlib_module_names | {"mtlaunch", "torch", "megatron", "transformer_engine"}
    known |= {"fused_weight_gradient_mlp_cuda"}  # Apex's kernel, which Megatron uses where it is
    assert_none([one for one in imports("kernels") if one.root not in known])


def test_the_runner_imports_the_standard_library_and_its_own_package() -> None:
    """And the kernels, but only once they are asked for: they are read by every rank."""
    wrong = []
    for one in imports("launcher/runner"):
        own = within(one, "mtlaunch.launcher.runner")
        kernels = within(one, "mtlaunch.kernels") or one.module == "mtlaunch"
        if one.root not in sys.stdlib_module_names and not own and (one.at_top or not kernels):
            wrong.append(one)
    assert_none(wrong)


def test_the_launcher_needs_no_more_than_the_base_install() -> None:
    known = sys.stdlib_module_names | {"mtlaunch"} | LOGIN_NODE
    assert_none([one for one in imports("launcher") if one.root not in known])


def test_only_the_payload_and_the_runner_know_the_kernels() -> None:
    may = ("launcher/rundir.py", "launcher/runner/")
    found = [one for one in imports("launcher") if within(one, "mtlaunch.kernels")]
    assert_none([one for one in found if not one.file.startswith(may)])


def test_nobody_outside_the_kernels_imports_torch_or_megatron() -> None:
    """The runner looks torch up in sys.modules: it is there if the script brought it."""
    for folder in ("launcher", "preflight", "templates"):
        for path in python_files(folder):
            heavy = ("torch", "megatron", "transformer_engine", "numpy")
            assert_none([one for one in imports_of(path) if one.root in heavy])


def test_the_kernels_can_be_looked_at_without_torch() -> None:
    """`inject` runs before the script; importing torch there would change what the script does."""
    found = [one for one in imports_of(ROOT / "kernels" / "inject.py") if one.at_top]
    assert_none([one for one in found if one.root in ("torch", "megatron")])


def test_only_the_renderer_and_init_read_templates() -> None:
    may = {"launcher/render.py", "launcher/cli.py"}
    readers = set()
    for folder in PACKAGES:
        for path in python_files(folder):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = isinstance(node, ast.Constant) and node.value == "mtlaunch.templates"
                if text:
                    readers.add(str(path.relative_to(ROOT)))
            if any(within(one, "mtlaunch.templates") for one in imports_of(path)):
                readers.add(str(path.relative_to(ROOT)))
    assert readers == may


def test_subprocesses_start_in_named_modules_only() -> None:
    """Rules, estimate, rendering and report are text in, text out."""
    may = {
        "launcher/doctor.py",
        "launcher/local.py",
        "launcher/local_job.py",
        "launcher/local_srun.py",
        "launcher/slurm.py",
    }
    folders = ("launcher", "preflight", "kernels")
    every = [one for folder in folders for one in imports(folder)]
    assert {one.file for one in every if one.root == "subprocess"} == may


# -- what runs on a login node ---------------------------------------------------------------------

LOADED = """\
import io, json, sys
sys.argv = ["mtlaunch", *sys.argv[1:]]
out, sys.stdout = sys.stdout, io.StringIO()
from mtlaunch.launcher.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=out)
"""


def loaded_by(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["code"] == 0, done.stderr
    return shown


@pytest.mark.parametrize(
    "words, light",
    [
        (["check", "templates/job.yaml"], NEVER_ON_CHECK),
        (["check", "examples/tiny-lora/job.yaml", "--format", "json"], NEVER_ON_CHECK),
        (["env", "templates/job.yaml"], NEVER_ON_CHECK),
        (["explain", "PIP001"], NEVER_ON_CHECK),
        (["--help"], (*NEVER_ON_CHECK, "msgspec", "yaml")),
        (["estimate", "templates/job.yaml"], ("torch", "numpy", "submitit", "jinja2", "megatron")),
        (["render", "templates/job.yaml"], ("torch", "numpy", "submitit", "rich", "megatron")),
        (
            ["submit", "examples/tiny-lora/job.yaml", "-n", "--executor", "local"],
            ("torch", "numpy"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_loads_only_what_it_needs(words: list[str], light: tuple[str, ...]) -> None:
    words = [str(ROOT / word) if word.endswith(".yaml") else word for word in words]
    modules = {name.partition(".")[0] for name in loaded_by(*words)["modules"]}
    assert modules & set(light) == set()


# -- what is shipped -------------------------------------------------------------------------------


def pyproject() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pytest needs it there
        import tomli as tomllib
    with (ROOT / "pyproject.toml").open("rb") as file:
        content: dict[str, Any] = tomllib.load(file)
    return content


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {path.parent for name in PACKAGES for path in python_files(name)}
    on_disk = {module_name(folder / "__init__.py") for folder in folders}
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == on_disk
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_every_data_file_is_shipped_with_its_package() -> None:
    patterns = pyproject()["tool"]["setuptools"]["package-data"]
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            owner = path.parent
            while not (owner / "__init__.py").exists():
                owner = owner.parent
            inner = str(path.relative_to(owner))
            globs = patterns.get(module_name(owner / "__init__.py"), [])
            assert any(fnmatch.fnmatchcase(inner, glob.removeprefix("**/")) for glob in globs), (
                f"{path.relative_to(ROOT)} is not in package-data"
            )


def test_no_file_knows_a_machine_it_was_made_on() -> None:
    """No file names this checkout, nor the home of whoever made it."""
    paths = "|".join(re.escape(f"{path}/") for path in (ROOT, Path.home()))
    machines = re.compile(rf"(?<![\w.-])(?:{paths})")  # at its start: a/src/b is none of /src/b
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {match[0]}" for match in machines.finditer(text)]
    assert found == []


def test_tests_are_no_packages() -> None:
    """An __init__.py in tests/launcher would hide the real launcher under pytest's old mode."""
    assert [path for path in (ROOT / "tests").rglob("__init__.py")] == []
