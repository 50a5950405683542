"""The resolved job file of a run directory: every value, with where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import yaml

from mtlaunch.preflight import flags
from mtlaunch.preflight.jobfile import Job
from mtlaunch.preflight.models import MODELS
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.yaml_text import Place


def resolved_yaml(job: Job, plan: Plan, workdir: str, ignored_rules: tuple[str, ...] = ()) -> str:
    """A job file that launches the same again, an origin behind each value."""
    lines = [f"# resolved from {' '.join(job.file.split())}"]
    if ignored_rules:
        lines.append(f"# submitted with --ignore {' '.join(ignored_rules)}")
    sections = {"args", "slurm", "env"} if plan.is_bridge else {"args", "slurm", "env", "model"}
    written = _written(job.content, job.document.data)
    content = {key: value for key, value in written.items() if key not in sections}
    content = {**content, "name": job.name, "workdir": workdir}
    lines += [_entry(key, value) for key, value in content.items()]
    for name in ("slurm", "env"):
        mapping = getattr(plan, name)
        lines += [f"{name}:"] if mapping else []
        for key, value in mapping.items():
            lines.append(f"  {_entry(key, value)}{_origin(plan.place(f'{name}.{key}'))}")
    arguments = list(_arguments(job, plan))
    lines += ["args:"] if arguments else []
    lines += [f"  {line}" for line in arguments]
    return "\n".join(lines) + "\n"


def _written(part: msgspec.Struct, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `part` that the job file gives: a default may be another one tomorrow."""
    given = {key: getattr(part, key) for key in part.__struct_fields__ if key in data}
    return {
        key: _written(value, data[key]) if isinstance(value, msgspec.Struct) else value
        for key, value in given.items()
    }


def _arguments(job: Job, plan: Plan) -> Iterator[str]:
    """The model's shape, then the arguments as written: the script reads their spelling."""
    written = job.content.args
    if not plan.is_bridge and isinstance(job.content.model, str):
        known = {flags.canonical(key)[0] for key in written}
        for name, value in MODELS[job.content.model.lower()].items():
            if name not in known:
                # a float as Python writes it: that is what the script gets
                shown = f"{_entry(name, 0)[:-1]}{value}" if isinstance(value, float) else None
                origin = _origin(Place(f"model: {job.content.model}"))
                yield (shown or _entry(name, value)) + origin
    for key, value in written.items():
        place = job.document.key_place(("args", key))
        typed = job.document.texts.get(("args", key))
        if typed and not isinstance(value, (dict, list)):  # as typed: 2e-2 is not 0.02 to a script
            yield f"{_entry(key, 0)[:-1]}{typed}{_origin(place)}"
        else:
            yield _entry(key, _typed(job, ("args", key), value)) + _origin(place)


def _typed(job: Job, path: tuple[str | int, ...], value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(job, (*path, index), item) for index, item in enumerate(value)]
    text = job.document.texts.get(path)
    return text if text is not None and str(value) != text and type(value) is float else value


def _entry(key: str, value: Any) -> str:
    """`key: value` on one line, collections in brackets.

    >>> _entry("time", "04:00:00"), _entry("mounts", ["/a:/b", "it's"]), _entry("a b", None)
    ("time: '04:00:00'", "mounts: ['/a:/b', it's]", 'a b: null')
    """
    text = yaml.dump(
        {key: value},
        Dumper=_Dumper,
        default_flow_style=True,
        width=float("inf"),
        sort_keys=False,
        allow_unicode=True,
    )
    return text.strip()[1:-1]


class _Dumper(yaml.SafeDumper):
    """Text with a line break in double quotes, where it stays on one line."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _origin(place: Place) -> str:
    return f"  # {' '.join(str(place).split())}"
