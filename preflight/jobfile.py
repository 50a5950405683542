"""The job file: YAML text to a validated JobFile whose every value knows its place.

Shape and words are the contract; what the values mean for Megatron is `resolve`'s work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from mtlaunch.preflight.yaml_text import Document, JobFileError, Path, Place, Problem, read

# Long options of sbatch: `man sbatch` of Slurm 22.05 and, from the online manual, 23.11 to 25.05
# (segment, stepmgr, tres-per-task, resv-ports, container-id, prefer, external).
SBATCH_OPTIONS = frozenset(
    """account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export
    export-file external extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode
    output overcommit oversubscribe parsable partition power prefer priority profile propagate
    qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node spread-job
    stepmgr switches test-only thread-spec threads-per-core time time-min tmp tres-bind
    tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey wrap""".split()
)

# What the rendered script and the run directory depend on: (option, what to do instead).
OWNED_OPTIONS = {
    "output": "logs go to the run directory",
    "error": "logs go to the run directory",
    "open-mode": "logs are always appended to",
    "job-name": "use the top-level `name`",
    "export": "use `env`; the script exports the whole block to the ranks",
    "export-file": "use `env`",
    "chdir": "use `workdir`",
    "wrap": "use `entrypoint`",
    "parsable": "mtlaunch reads sbatch's answer itself",
    "wait": "use `mtlaunch submit --wait`",
    "test-only": "use `mtlaunch submit --dry-run`",
    "array": "`sweep` will render arrays",
}

RESERVED_KEYS = ("sweep", "chain", "requeue", "notify", "nodes_exclude", "health_check", "snapshot")

LORA_VARIANTS = ("base", "regather", "gather-free")


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), defer_build=True
    )


def _string_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _version(value: Any) -> Any:
    # `megatron_core: 0.19` is read as typed (see `_typed_texts`); a lone number is a major version.
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


# The JSON Schema lets an editor accept what is taken as typed: `megatron_core: 0.19`, `A: 1`.
_VERSION = r"^\d+(\.\d+)*([.+\-a-z].*)?$"
Version = Annotated[
    str,
    BeforeValidator(_version),
    Field(pattern=_VERSION),
    WithJsonSchema({"type": ["string", "number"], "pattern": _VERSION, "examples": ["0.19"]}),
]
EnvValue = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean", "null"]})]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Cluster(_Model):
    """What the checks assume about the machine; nothing is read from the login node."""

    gpu: str | None = Field(None, description="MODEL-SIZE, for example H100-80GB")
    node_ram_gb: float | None = Field(None, gt=0, description="host memory of a node, GB")
    megatron_core: Version | None = Field(None, description="whose rules apply; default: newest")
    torch: Version | None = None
    transformer_engine: Version | None = None
    slurm: Version | None = None
    nccl: Version | None = None
    env: dict[EnvName, EnvValue] = Field({}, description="environment of the site, below `env`")


class ModuleEntrypoint(_Model):
    module: str = Field(description="run as `python -m`")


class HFConfig(_Model):
    hf_config: str = Field(description="path of a Hugging Face config.json")


class Lora(_Model):
    """LoRA attached by the rank runner, the base frozen."""

    dim: int = Field(32, gt=0)
    alpha: float = Field(32, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Annotated[list[str], BeforeValidator(_string_list), Field(min_length=1)] = [
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    ]
    sequence_parallel: Literal["base", "regather", "gather-free"] = Field(
        "base", description="what a LoRA-A input under sequence parallelism leaves in memory"
    )


class Container(_Model):
    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: Annotated[list[str], BeforeValidator(_string_list)] = []
    workdir: str | None = None


class Colocated(_Model):
    engine: str
    version: Version | None = None
    sleep_mode: bool | None = None
    weight_sync: str | None = None


class Facts(_Model):
    """What only the user can know; rules stay silent without it."""

    checkpoint_seconds: float | None = Field(None, ge=0)
    restartable: bool | None = None
    colocated: Colocated | None = None


SlurmValue = str | int | float | bool | list[str] | None
ArgValue = str | int | float | bool | list[Any] | dict[str, Any] | None


class JobFile(_Model):
    """A launch: what to run, on what, and how."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="job name; default: the file's name",
    )
    slurm: dict[str, SlurmValue] = Field({}, description="any sbatch long option, with - or _")
    launcher: Literal["srun", "torchrun"] = Field(
        "srun", description="srun: one task a GPU; torchrun: one task a node"
    )
    cluster: str | Cluster = Field(Cluster(), description="a profile by name, or a mapping")
    entrypoint: str | ModuleEntrypoint | None = Field(None, description="the training script")
    framework: Literal["megatron-lm", "megatron-bridge"] | None = None
    python: str | None = Field(None, description="interpreter of the ranks")
    workdir: str | None = Field(None, description="where the script runs; default: here")
    setup: Annotated[list[str], BeforeValidator(_string_list)] = Field(
        [], description="shell lines, taken as they are"
    )
    model: str | HFConfig | None = Field(None, description="a known shape; args win over it")
    args: dict[str, ArgValue] = Field({}, description="the script's flags, without dashes")
    extra_args: list[str] = Field([], description="passed on unread")
    lora: Lora | None = None
    env: dict[EnvName, EnvValue] = Field({}, description="wins over the computed block")
    secrets: list[EnvName] = Field([], description="names only, from the submit shell")
    container: Container | None = None
    facts: Facts = Facts()


@dataclass(frozen=True, slots=True)
class Job:
    """A job file as read: its validated content and the document behind it."""

    file: str
    content: JobFile
    document: Document

    @property
    def name(self) -> str:
        if self.content.name:
            return self.content.name
        stem = self.file.rsplit("/", 1)[-1].rsplit(".", 1)[0]
        cleaned = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("-._")
        return cleaned or "job"


def parse(text: str, file: str = "job.yaml", assignments: Iterable[str] = ()) -> Job:
    """Read a job file's text, with `--set` assignments ("slurm.nodes=8") on top.

    Raises JobFileError with all problems at once.
    """
    document = read(text, file)
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        message = "a job file is a mapping of keys such as slurm:, entrypoint:, args:"
        raise JobFileError([Problem(message, Place(file, 1, 1), "see `mtlaunch init`")], text)
    problems = [p for p in (_assign(document, one) for one in assignments) if p]
    problems += _shape_problems(document)
    data = _typed_texts(document)
    content: JobFile | None = None
    try:
        content = JobFile.model_validate(data)
    except ValidationError as error:
        problems += _validation_problems(error, document)
    if problems or content is None:
        problems.sort(key=lambda p: (p.place.line, p.place.column))
        raise JobFileError(problems, text)
    return Job(file, content, document)


def from_mapping(data: Mapping[str, Any], file: str = "job") -> Job:
    """A Job from plain data, for callers that have no YAML text."""
    import yaml

    return parse(yaml.safe_dump(dict(data), sort_keys=False), file)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    near = difflib.get_close_matches(word, sorted(known), 1, cutoff)
    return f"did you mean '{near[0]}'?" if near else ""


def _assign(document: Document, assignment: str) -> Problem | None:
    """Apply one `--set a.b=c`; below `args` and `env` the rest of the path is one key."""
    place = Place(f"--set {assignment}")
    dotted, equals, text = assignment.partition("=")
    keys = [key for key in dotted.strip().split(".") if key]
    if not equals or not keys:
        return Problem(f"--set wants KEY=VALUE, got '{assignment}'", place, "--set slurm.nodes=8")
    if keys[0] in ("args", "env") and len(keys) > 2:
        keys = [keys[0], ".".join(keys[1:])]
    try:
        value = read(text, place.file)
    except JobFileError as error:
        return Problem(f"--set {dotted}: {error.problems[0].message}", place, "quote the value")
    parent: Any = document.data
    path: Path = ()
    for key in keys[:-1]:
        path = (*path, key)
        child = parent.get(key)
        if child is None:
            child = parent[key] = {}
            document.keys[path] = document.values[path] = place
        if not isinstance(child, dict):
            return Problem(f"--set {dotted}: '{key}' is not a mapping", place)
        parent = child
    path = (*path, _existing_spelling(parent, keys[-1]))
    for known in [p for p in document.texts if p[: len(path)] == path]:
        del document.texts[known]
    parent[path[-1]] = value.data
    document.keys[path] = document.values[path] = place
    document.texts.update({(*path, *inner): typed for inner, typed in value.texts.items()})
    return None


def _existing_spelling(mapping: Mapping[str, Any], key: str) -> str:
    """`--set args.num_layers=4` replaces a `num-layers:` of the file."""
    for known in mapping:
        if known.replace("_", "-") == key.replace("_", "-"):
            return known
    return key


def _shape_problems(document: Document) -> list[Problem]:
    """What pydantic cannot say well: reserved keys, sbatch options, equal flags."""
    data, problems = document.data, []
    for key in RESERVED_KEYS:
        if key in data:
            place = document.key_place((key,))
            problems.append(
                Problem(f"'{key}' is reserved and does nothing in this version", place, "remove it")
            )
    slurm = data.get("slurm")
    if isinstance(slurm, dict):
        problems += _twice(document, "slurm", slurm)
        for key in slurm:
            option = key.replace("_", "-").removeprefix("--")
            place = document.key_place(("slurm", key))
            if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
                problems.append(Problem(f"{key!r} is no name of an sbatch option", place))
            elif option in OWNED_OPTIONS:
                message = f"slurm.{key} is set by mtlaunch"
                problems.append(Problem(message, place, OWNED_OPTIONS[option]))
            elif option not in SBATCH_OPTIONS:
                hint = did_you_mean(option, SBATCH_OPTIONS, 0.8)
                if hint:  # otherwise it may be an option of a SPANK plugin of the site
                    problems.append(Problem(f"sbatch has no option --{option}", place, hint))
    if isinstance(data.get("args"), dict):
        problems += _twice(document, "args", data["args"])
    return problems


def _twice(document: Document, section: str, mapping: Mapping[str, Any]) -> list[Problem]:
    seen: dict[str, str] = {}
    problems = []
    for key in mapping:
        plain = key.replace("_", "-").lstrip("-")
        if plain in seen:
            message = f"{section}.{key} is the same option as {section}.{seen[plain]}"
            place = document.key_place((section, key))
            problems.append(Problem(message, place, "keep one of the two"))
        seen[plain] = key
    return problems


def _typed_texts(document: Document) -> dict[str, Any]:
    """The data for validation: fields that are text take the scalar as typed.

    `time: 04:00:00`, `env: {A: 012}`, `megatron_core: 0.20` keep their spelling.
    """
    data = dict(document.data)

    def typed(path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: typed((*path, key), item) for key, item in value.items()}
        if isinstance(value, list):
            return [typed((*path, index), item) for index, item in enumerate(value)]
        if value is None:
            return None
        return document.as_typed(path, value)

    for key in ("name", "env", "setup", "secrets", "extra_args", "entrypoint", "python", "workdir"):
        if key in data:
            data[key] = typed((key,), data[key])
    if isinstance(data.get("env"), dict):  # an empty value is an empty variable
        data["env"] = {k: "" if v is None else v for k, v in data["env"].items()}
    if isinstance(data.get("slurm"), dict):
        data["slurm"] = {
            key: value if isinstance(value, bool) else typed(("slurm", key), value)
            for key, value in data["slurm"].items()
        }
    if isinstance(data.get("cluster"), dict):
        cluster = dict(data["cluster"])
        for key in ("gpu", "megatron_core", "torch", "transformer_engine", "slurm", "nccl", "env"):
            if key in cluster:
                cluster[key] = typed(("cluster", key), cluster[key])
        data["cluster"] = cluster
    for key in RESERVED_KEYS:
        data.pop(key, None)
    return data


def _known_keys(location: Sequence[str | int]) -> Iterable[str]:
    models: dict[str, type[BaseModel]] = {
        "cluster": Cluster,
        "lora": Lora,
        "container": Container,
        "facts": Facts,
        "entrypoint": ModuleEntrypoint,
        "model": HFConfig,
        "colocated": Colocated,
    }
    for part in reversed(location[:-1]):
        if part in models:
            return models[str(part)].model_fields
    return JobFile.model_fields


def _validation_problems(error: ValidationError, document: Document) -> list[Problem]:
    problems: dict[tuple[Place, str], Problem] = {}
    details = error.errors(include_url=False)
    for detail in details:
        # pydantic puts the tried member of a union into the location; the document has no such key
        location = _document_path(detail["loc"], document)
        place = document.place(location)
        dotted = ".".join(map(str, location))
        hint = ""
        if detail["type"] == "extra_forbidden":
            word = str(detail["loc"][-1])
            message = f"unknown key '{dotted}'"
            place = document.key_place(location)
            known = list(_known_keys(detail["loc"]))
            hint = did_you_mean(word, known) or "known here: " + ", ".join(known)
        elif detail["type"] in ("string_type", "model_type") and _union_sibling(detail, details):
            continue
        else:
            given = detail.get("input")
            shown = "" if isinstance(given, (dict, list)) else f", got {given!r}"
            message = f"{dotted}: {_lower_first(detail['msg'])}{shown}"
        problems.setdefault((place, message), Problem(message, place, hint))
    return list(problems.values())


def _document_path(location: Sequence[str | int], document: Document) -> Path:
    path: Path = ()
    data = document.data
    for index, part in enumerate(location):
        if isinstance(data, dict) and part in data:
            path, data = (*path, part), data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path, data = (*path, part), data[part]
        elif index == len(location) - 1 and isinstance(data, dict):
            path = (*path, part)  # a missing key
    return path


def _union_sibling(detail: Any, details: Sequence[Any]) -> bool:
    """A union member that does not fit, while another member has a better complaint."""
    head = detail["loc"][0]
    given = detail.get("input")
    return isinstance(given, dict) and any(
        other is not detail and other["loc"][0] == head and other["type"] != detail["type"]
        for other in details
    )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job file."""
    schema = JobFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "mtlaunch job file"
    return schema
