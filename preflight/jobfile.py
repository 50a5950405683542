"""The job file: YAML text to a validated JobFile whose every value knows its place.

Shape and words are the contract; what the values mean for Megatron is `resolve`'s work.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

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


# -- the shape ---------------------------------------------------------------------------------
#
# `extra` of a Meta is for the reader below: "words" say in a complaint what a value has to be,
# "lone" lets one text stand for a list of one. `_TYPES` replaces the type in the JSON Schema, so
# that an editor accepts what is taken as typed: `megatron_core: 0.19`, `A: 1`. Patterns end in \Z:
# Python's $ lets a last line break pass.

_TYPES = "x-types"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*\Z"

Version = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]+(\.[0-9]+)*([.+\-a-z].*)?\Z",
        examples=["0.19"],
        extra={"words": "a version such as 0.19"},
        extra_json_schema={_TYPES: ["string", "number"]},
    ),
]
EnvValue = Annotated[str, Meta(extra_json_schema={_TYPES: ["string", "number", "boolean", "null"]})]
EnvName = Annotated[
    str,
    Meta(pattern=_ENV_NAME, extra={"words": "a variable's name of letters, digits and _"}),
]
Env = Annotated[
    dict[EnvName, EnvValue], Meta(extra_json_schema={"propertyNames": {"pattern": _ENV_NAME}})
]
Texts = Annotated[
    list[str], Meta(extra={"lone": True}, extra_json_schema={_TYPES: ["string", "array"]})
]


class Cluster(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the checks assume about the machine; nothing is read from the login node."""

    gpu: Annotated[str | None, Meta(description="MODEL-SIZE, for example H100-80GB")] = None
    node_ram_gb: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="host memory of a node, GB")
    ] = None
    megatron_core: Annotated[
        Version | None, Meta(description="whose rules apply; default: newest")
    ] = None
    torch: Version | None = None
    transformer_engine: Version | None = None
    slurm: Version | None = None
    nccl: Version | None = None
    env: Annotated[Env, Meta(description="environment of the site, below `env`")] = {}


class ModuleEntrypoint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    module: Annotated[str, Meta(description="run as `python -m`")]


class HFConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    hf_config: Annotated[str, Meta(description="path of a Hugging Face config.json")]


class Lora(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """LoRA attached by the rank runner, the base frozen."""

    dim: Annotated[int, Meta(ge=1)] = 32
    alpha: Annotated[float, Meta(gt=0)] = 32
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    target_modules: Annotated[
        Texts, Meta(min_length=1, extra={"words": "one or more names of modules"})
    ] = msgspec.field(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    sequence_parallel: Annotated[
        Literal["base", "regather", "gather-free"],
        Meta(description="what a LoRA-A input under sequence parallelism leaves in memory"),
    ] = "base"


class Container(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: Texts = []
    workdir: str | None = None


class Colocated(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    engine: str
    version: Version | None = None
    sleep_mode: bool | None = None
    weight_sync: str | None = None


class Facts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What only the user can know; rules stay silent without it."""

    checkpoint_seconds: Annotated[float, Meta(ge=0)] | None = None
    restartable: bool | None = None
    colocated: Colocated | None = None


SlurmValue = str | int | float | bool | list[str] | None
ArgValue = str | int | float | bool | list[Any] | dict[str, Any] | None
JobName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z",
        max_length=100,
        extra={"words": "a letter or digit, then up to 99 letters, digits, '.', '_' or '-'"},
    ),
]


class JobFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A launch: what to run, on what, and how."""

    name: Annotated[JobName | None, Meta(description="job name; default: the file's name")] = None
    slurm: Annotated[
        dict[str, SlurmValue], Meta(description="any sbatch long option, with - or _")
    ] = {}
    launcher: Annotated[
        Literal["srun", "torchrun"],
        Meta(description="srun: one task a GPU; torchrun: one task a node"),
    ] = "srun"
    cluster: Annotated[str | Cluster, Meta(description="a profile by name, or a mapping")] = (
        Cluster()
    )
    entrypoint: Annotated[
        str | ModuleEntrypoint | None, Meta(description="the training script")
    ] = None
    framework: Literal["megatron-lm", "megatron-bridge"] | None = None
    python: Annotated[str | None, Meta(description="interpreter of the ranks")] = None
    workdir: Annotated[str | None, Meta(description="where the script runs; default: here")] = None
    setup: Annotated[Texts, Meta(description="shell lines, taken as they are")] = []
    model: Annotated[str | HFConfig | None, Meta(description="a known shape; args win over it")] = (
        None
    )
    args: Annotated[
        dict[str, ArgValue], Meta(description="the script's flags, without dashes")
    ] = {}
    extra_args: Annotated[list[str], Meta(description="passed on unread")] = []
    lora: Lora | None = None
    env: Annotated[Env, Meta(description="wins over the computed block")] = {}
    secrets: Annotated[list[EnvName], Meta(description="names only, from the submit shell")] = []
    container: Container | None = None
    facts: Facts = Facts()


@dataclass(frozen=True, slots=True)
class Job:
    """A job file as read: its validated content and the document behind it."""

    file: str
    content: JobFile
    document: Document

    unread: frozenset[str] = frozenset()  # keys that are there, but wrong

    @property
    def name(self) -> str:
        if self.content.name:
            return self.content.name
        stem = self.file.rsplit("/", 1)[-1].rsplit(".", 1)[0]
        kept = (c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)
        return "".join(kept).strip("-._")[:100] or "job"


class UnreadJobError(JobFileError):
    """Problems of a job file's shape, with what could be read beside them."""

    def __init__(self, problems: list[Problem], source: str, job: Job) -> None:
        super().__init__(in_order(problems), source)
        self.job = job


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Each once, in the order of the file."""
    return sorted(dict.fromkeys(problems), key=lambda p: (p.place.line, p.place.column))


def parse(text: str, file: str = "job.yaml", assignments: Iterable[str] = ()) -> Job:
    """Read a job file's text, with `--set` assignments ("slurm.nodes=8") on top.

    Raises JobFileError with all problems at once.
    """
    document = read(text, file)
    problems = list(document.problems)
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        message = "a job file is a mapping of keys such as slurm:, entrypoint:, args:"
        problems.append(Problem(message, Place(file, 1, 1), "see `mtlaunch init`"))
        raise JobFileError(problems, text)
    problems += [p for p in (_assign(document, one) for one in assignments) if p]
    problems += _shape_problems(document)
    reader = _Reader(document)
    content = reader.struct(JobFile, _typed_texts(document), ())
    problems += reader.problems
    job = Job(file, content, document, frozenset(reader.unread))
    if problems:
        raise UnreadJobError(problems, text, job)
    return job


def from_mapping(data: Mapping[str, Any], file: str = "job") -> Job:
    """A Job from plain data, for callers that have no YAML text."""
    import yaml

    return parse(yaml.safe_dump(dict(data), sort_keys=False), file)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """The known word that is most like `word`, "" when none is like it."""
    return next(iter(difflib.get_close_matches(word, sorted(known), 1, cutoff)), "")


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    near = nearest(word, known, cutoff)
    return f"did you mean '{near}'?" if near else ""


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
        if value.problems:
            raise JobFileError(value.problems)
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
    """What the types cannot say: reserved keys, sbatch options, equal flags."""
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


_TEXTS: frozenset[Path] = frozenset(
    [(key,) for key in "name env setup secrets extra_args entrypoint python workdir".split()]
    + [("cluster", key) for key in "gpu megatron_core torch transformer_engine slurm nccl".split()]
    + [("cluster", "env"), ("facts", "colocated", "version")]
)


def _typed_texts(document: Document) -> dict[str, Any]:
    """The data for validation: fields that are text take the scalar as typed.

    `time: 04:00:00`, `env: {A: 012}`, `megatron_core: 0.20` keep their spelling.
    """

    def typed(path: Path, value: Any, text: bool) -> Any:
        text = text or path in _TEXTS or (path[:-1] == ("slurm",) and not isinstance(value, bool))
        if isinstance(value, dict):
            return {key: typed((*path, key), item, text) for key, item in value.items()}
        if isinstance(value, list):
            return [typed((*path, index), item, text) for index, item in enumerate(value)]
        return document.as_typed(path, value) if text and value is not None else value

    data = {
        key: typed((key,), value, False)
        for key, value in document.data.items()
        if key not in RESERVED_KEYS
    }
    if isinstance(data.get("env"), dict):  # an empty value is an empty variable
        data["env"] = {k: "" if v is None else v for k, v in data["env"].items()}
    return data


# -- data to the shape -------------------------------------------------------------------------

_KINDS = {
    str: ("text",),
    int: ("a whole number",),
    float: ("a number",),
    bool: ("true", "false"),
}


class _Reader:
    """Converts plain data value by value: msgspec alone would stop at the first wrong one."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.unread: set[str] = set()  # keys of the top that are there, and wrong

    def struct(self, model: Any, data: Mapping[str, Any], path: Path) -> Any:
        """A `model` of what `data` has right; None when a required key is not among it."""
        fields = _fields(model)
        values = {}
        for key, value in data.items():
            inner = (*path, key)
            before = len(self.problems)
            if key in fields:
                read_value = self.value(fields[key].type, value, inner)
                if len(self.problems) == before:
                    values[key] = read_value
                elif not path:
                    self.unread.add(key)
            else:
                near = nearest(key, fields)
                hint = f"did you mean '{near}'?" if near else "known here: " + ", ".join(fields)
                place = self.document.key_place(inner)
                self.problems.append(Problem(f"unknown key '{_dotted(inner)}'", place, hint))
                if not path and near:
                    self.unread.add(near)
        for key, field in fields.items():
            if field.required and key not in data:
                inner = (*path, key)
                message = f"{_dotted(inner)}: missing, expected {_expected(field.type, None)}"
                self.problems.append(Problem(message, self.document.place(inner)))
        required = (key for key, field in fields.items() if field.required)
        return model(**values) if all(key in values for key in required) else None

    def value(self, wanted: Any, value: Any, path: Path) -> Any:
        """`value` as the type `wanted`; of a union, as the member that it looks like."""
        for member in _members(wanted):
            kind, extra, _ = _unwrapped(member)
            origin, inner = typing.get_origin(kind), typing.get_args(kind)
            if isinstance(value, dict) and _is_struct(kind):
                return self.struct(kind, value, path)
            if isinstance(value, dict) and origin is dict:
                for key in value:
                    key_path = (*path, key)
                    self.convert(inner[0], key, key_path, self.document.key_place(key_path))
                return {
                    key: self.value(inner[1], item, (*path, key)) for key, item in value.items()
                }
            if isinstance(value, str) and origin is list and "lone" in extra:
                value = [value]
            if isinstance(value, list) and origin is list:
                before = len(self.problems)
                for index, item in enumerate(value):
                    self.value(inner[0], item, (*path, index))
                if len(self.problems) > before:
                    return None
        return self.convert(wanted, value, path, self.document.place(path))

    def convert(self, wanted: Any, value: Any, path: Path, place: Place) -> Any:
        if _fits(value, wanted):
            return msgspec.convert(value, wanted, strict=False)
        message = f"{_dotted(path)}: expected {_expected(wanted, value)}"
        self.problems.append(Problem(f"{message}, got {self.shown(value, path)}", place))
        return None

    def shown(self, value: Any, path: Path) -> str:
        if value is None:
            return "nothing"
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list):
            return "a list" if value else "an empty list"
        return repr(value) if isinstance(value, str) else str(self.document.as_typed(path, value))


@functools.cache
def _fields(model: Any) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(model)}


def _fits(value: Any, wanted: Any) -> bool:
    """Whether msgspec takes `value`, quoted numbers and 8.0 for 8 with it."""
    try:
        return msgspec.convert(value, wanted, strict=False) is not None or value is None
    except msgspec.ValidationError:
        return False


def _unwrapped(wanted: Any) -> tuple[Any, dict[str, Any], list[Meta]]:
    """A type without its Annotated, what its Metas say to the reader, and the Metas."""
    if typing.get_origin(wanted) is not Annotated:
        return wanted, {}, []
    metas = [meta for meta in wanted.__metadata__ if isinstance(meta, Meta)]
    extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
    return wanted.__origin__, extra, metas


def _members(wanted: Any) -> tuple[Any, ...]:
    kind = _unwrapped(wanted)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (wanted,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _expected(wanted: Any, value: Any) -> str:
    """What a value has to be, in words: "srun or torchrun", "at least 1"."""
    words = list(dict.fromkeys(word for m in _members(wanted) for word in _words(m, value)))
    if "a number" in words and "a whole number" in words:
        words.remove("a whole number")
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _words(member: Any, value: Any) -> Iterator[str]:
    kind, extra, metas = _unwrapped(member)
    bounds = [
        f"{word} {bound:g}"
        for meta in metas
        for word, bound in (("at least", meta.ge), ("above", meta.gt), ("below", meta.lt))
        if bound is not None
    ]
    if "words" in extra:
        yield extra["words"]
    elif bounds and _fits(value, kind):
        yield " and ".join(bounds)
    elif typing.get_origin(kind) is Literal:
        yield from map(str, typing.get_args(kind))
    elif typing.get_origin(kind) is list:
        yield from ("text", "a list") if "lone" in extra else ("a list",)
    elif typing.get_origin(kind) is dict or _is_struct(kind):
        yield "a mapping"
    elif kind is not types.NoneType:
        yield from _KINDS[kind]


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job file."""
    definitions = _for_editors(msgspec.json.schema(JobFile)["$defs"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **definitions.pop("JobFile"),
        "title": "mtlaunch job file",
        "$defs": definitions,
    }


def _for_editors(schema: Any) -> Any:
    """A schema with the types of `_TYPES`, which a Meta cannot set, and ECMAScript's patterns."""
    if isinstance(schema, list):
        return [_for_editors(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    replaced = {key: _for_editors(item) for key, item in schema.items()}
    if _TYPES in replaced:
        replaced["type"] = replaced.pop(_TYPES)
    if isinstance(replaced.get("pattern"), str):
        replaced["pattern"] = replaced["pattern"].replace(r"\Z", "$")
    return replaced
