"""The import hook, against stand-in megatron packages: no torch, no real Megatron.

Each case runs in a process of its own, since what is tested is the state of the import system.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GPT_MODEL = """
class GPTModel:
    def __init__(self, name):
        print("built", name)
"""

HEAD = """
import sys
for absent in ("torch", "megatron.core.extensions"):
    sys.modules[absent] = None  # importing them fails
sys.path.insert(0, {packages!r})

from mtlaunch.kernels import inject

inject.attach = lambda model, lora, chunk: print("attached", model.name, chunk) or {{"n": chunk}}
LORA = {{"dim": 8, "sequence_parallel": "regather"}}

def report(found):
    print("reported", found)
"""


@pytest.fixture
def run(tmp_path):
    """run(script, gpt_model=source) -> completed process, with that source as Megatron's GPT."""

    def run(script: str, gpt_model: str = GPT_MODEL, check: bool = True):
        package = tmp_path / "megatron" / "core" / "models" / "gpt"
        package.mkdir(parents=True)
        for folder in [package, *package.parents[:3]]:
            (folder / "__init__.py").touch()
        (package / "gpt_model.py").write_text(gpt_model)
        (tmp_path / "megatron" / "core" / "package_info.py").write_text('__version__ = "9.9.0"\n')
        source = HEAD.format(packages=str(tmp_path)) + textwrap.dedent(script)
        return subprocess.run(
            [sys.executable, "-c", source],
            check=check,
            capture_output=True,
            text=True,
            timeout=30,
            cwd=Path(__file__).parent,
        )

    return run


BUILD = """
class Named(GPTModel):
    def __init__(self, name):
        super().__init__(name)
        self.name = name
        print("completed", name)

Named("a")
Named("b")
"""

BOTH_ATTACHED = [
    "built a",
    "completed a",
    "attached a 0",
    "reported {'lora': {'n': 0}}",
    "built b",
    "completed b",
    "attached b 1",
    "reported {'lora': {'n': 1}}",
]


def test_installed_before_megatron_is_imported(run):
    found = run(
        """
        inject.install(LORA, report)
        from megatron.core.models.gpt.gpt_model import GPTModel
        """
        + textwrap.indent(BUILD, " " * 8)
    )
    assert found.stdout.splitlines() == BOTH_ATTACHED


def test_installed_after_megatron_is_imported(run):
    found = run(
        """
        from megatron.core.models.gpt.gpt_model import GPTModel
        inject.install(LORA, report)
        """
        + textwrap.indent(BUILD, " " * 8)
    )
    assert found.stdout.splitlines() == BOTH_ATTACHED


def test_subclass_that_exists_already(run):
    """Adapters come when the outermost __init__ is done, whenever the class was made."""
    found = run(
        """
        from megatron.core.models.gpt.gpt_model import GPTModel
        class Early(GPTModel):
            def __init__(self, name):
                super().__init__(name)
                self.name = name
        inject.install(LORA, report)
        Early("early")
        """
    )
    assert found.stdout.splitlines() == [
        "built early",
        "attached early 0",
        "reported {'lora': {'n': 0}}",
    ]


def test_twice_is_once(run):
    found = run(
        """
        inject.install(LORA, report)
        inject.install(dict(LORA), report)
        from megatron.core.models.gpt.gpt_model import GPTModel
        inject.install(LORA, report)
        """
        + textwrap.indent(BUILD, " " * 8)
    )
    assert found.stdout.splitlines() == BOTH_ATTACHED


def test_twice_with_other_settings_is_refused(run):
    found = run(
        "inject.install(LORA, report)\ninject.install({**LORA, 'dim': 16}, report)", check=False
    )
    assert "LoRA is installed already, with other settings" in found.stderr


def test_nothing_is_imported_or_patched_by_waiting(run):
    found = run(
        """
        before = set(sys.modules)
        inject.install(LORA, report)
        import json
        print([name for name in set(sys.modules) - before if name.startswith("megatron")])
        import megatron.core.models
        print([type(finder).__name__ for finder in sys.meta_path][0])
        from megatron.core.models.gpt import gpt_model
        print([type(finder).__name__ for finder in sys.meta_path if "After" in str(finder)])
        """
    )
    assert found.stdout.splitlines() == ["[]", "_AfterImport", "[]"]


@pytest.mark.parametrize("first", ["inject.install(LORA, report)", ""])
def test_missing_symbol_names_the_versions(run, first):
    found = run(
        f"""
        {first}
        import megatron.core.models.gpt.gpt_model
        inject.install(LORA, report)
        """,
        gpt_model="class GPT: pass",
        check=False,
    )
    assert found.returncode == 1
    assert "megatron-core 9.9.0 has no GPTModel; known versions are 0.16 to 0.19" in found.stderr


@pytest.mark.parametrize(
    "lora, message",
    [
        ({"rank": 8}, "unknown key in lora: rank; known: dim, alpha, dropout"),
        ({"sequence_parallel": "re-gather"}, "is 're-gather'; known: base, regather, gather-free"),
        ({"dim": 0}, "lora.dim is 0"),
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
        ({"target_modules": []}, "lora.target_modules is empty"),
    ],
)
def test_settings_are_checked(lora, message):
    from mtlaunch.kernels.inject import LoRA

    with pytest.raises(ValueError, match=message):
        LoRA.from_mapping(lora)
