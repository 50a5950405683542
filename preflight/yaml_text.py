"""YAML as plain data with the place of every key and value.

PyYAML follows YAML 1.1, where `12:30:00` is 45000, `012` is 10 and `1e3` is text, and lets the
last of two equal keys win. People mean other things in a job file, so scalars are resolved here,
from the composed nodes, and the source text of each is kept for fields that want it as typed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

MERGE = "tag:yaml.org,2002:merge"

# Aliases written out; nine lines of `[*a, *a, …]` would make a billion.
MOST_VALUES = 100_000
DEEPEST = 100

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {
    word: value
    for words, value in ((("true", "yes", "on"), True), (("false", "no", "off"), False))
    for lower in words
    for word in (lower, lower.capitalize(), lower.upper())
}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_OCTAL = re.compile(r"0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: 1-based line and column of a file, or a word such as `--set`."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that keeps a job file from being read."""

    message: str
    place: Place
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" + (f"\n  fix: {self.hint}" if self.hint else "")


class JobFileError(ValueError):
    """A job file that cannot be read; carries every problem found, not the first one."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
        self.source = source


@dataclass(slots=True)
class Document:
    """Plain data of a YAML text, with places by path.

    `texts` holds the source text of plain (unquoted) scalars, `keys` and `values` the place of
    each key and value; a path is a tuple of keys and list indices.
    """

    file: str
    source: str
    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path) -> Place:
        """The place of the value at `path`, or of the nearest parent that has one."""
        for end in range(len(path), -1, -1):
            for places in (self.values, self.keys):
                if path[:end] in places:
                    return places[path[:end]]
        return Place(self.file, 1, 1)

    def key_place(self, path: Path) -> Place:
        return self.keys.get(path) or self.place(path)

    def as_typed(self, path: Path, value: Any) -> Any:
        """The source text of an unquoted scalar at `path`, else `value` itself."""
        return self.texts.get(path, value)


def resolve_plain(text: str) -> Any:
    """What a person means by an unquoted scalar.

    >>> [resolve_plain(t) for t in ("012", "1e3", "04:00:00", "1_000", "no", "0x10", "~")]
    [12, 1000.0, '04:00:00', 1000, False, 16, None]
    """
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    return float("nan") if text.lower() == ".nan" else text


def read(text: str, file: str) -> Document:
    """Compose `text` into a Document.

    Duplicate keys, keys that are not text and tags other than `!!str` are the document's problems:
    the rest of it is read. Raises JobFileError with a place for syntax errors, aliases of what
    they stand in, and texts that aliases blow up.
    """
    document = Document(file, text)
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
        hint = "indent with spaces" if "cannot start any token" in str(error.problem) else ""
        message = " ".join(filter(None, (error.context, error.problem)))
        raise JobFileError([Problem(f"not YAML: {message}", place, hint)], text) from error
    except yaml.YAMLError as error:
        raise JobFileError([Problem(f"not YAML: {error}", Place(file, 1, 1))], text) from error
    reader = _Reader(document)
    document.data = reader.value(root, ()) if root is not None else None
    document.problems = reader.problems
    return document


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)


_Pair = tuple[yaml.Node, yaml.Node]


class _Reader:
    """Nodes to plain data; fills a document's places and texts."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.count = 0
        self.open: set[int] = set()  # the nodes around the one that is read
        self.merged: dict[int, dict[str, _Pair] | None] = {}

    def place(self, node: yaml.Node) -> Place:
        return _place(node, self.document.file)

    def complain(self, message: str, place: Place, hint: str = "") -> None:
        self.problems.append(Problem(message, place, hint))

    def value(self, node: yaml.Node, path: Path) -> Any:
        document = self.document
        self.count += 1
        if self.count > MOST_VALUES:
            place = document.key_place(path)
            message = f"more than {MOST_VALUES:,} values, aliases (`*name`) written out"
            hint = "a job file has some hundreds: do not nest aliases in what they stand for"
            raise JobFileError([*self.problems, Problem(message, place, hint)], document.source)
        if id(node) in self.open:
            place = document.key_place(path)
            self.complain("an alias stands in what it is the alias of", place, "write it out")
            return None
        if len(path) > DEEPEST:
            self.complain(f"nested deeper than {DEEPEST} levels", self.place(node))
            return None
        document.values[path] = self.place(node)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        self.open.add(id(node))
        data: Any
        if isinstance(node, yaml.MappingNode):
            data = self.mapping(node, path)
        else:
            data = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        self.open.discard(id(node))
        return data

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if node.style:  # quoted or a block: text
            return node.value
        if not node.tag.startswith("tag:yaml.org,2002:"):
            place = self.document.values[path]
            self.complain(f"the tag {node.tag} is not supported", place, "quote the value")
            return None
        self.document.texts[path] = node.value
        return resolve_plain(node.value)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Place] = {}
        for key, value in node.value:
            place = self.place(key)
            if key.tag == MERGE:
                self.check_merge(value, place)
            elif not isinstance(key, yaml.ScalarNode):
                self.complain("a key must be text", place)
            elif key.value in own:
                message = f"duplicate key '{key.value}' (first on line {own[key.value].line})"
                self.complain(message, place, "keep one of the two")
            else:
                own[key.value] = place
        data: dict[str, Any] = {}
        for name, (key, value) in self.pairs(node).items():
            inner: Path = (*path, name)
            self.document.keys[inner] = self.place(key)
            data[name] = self.value(value, inner)
        return data

    def check_merge(self, value: yaml.Node, place: Place) -> None:
        parents = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(parent, yaml.MappingNode) for parent in parents):
            hint = "<<: *name of a mapping, or <<: [*one, *other]"
            self.complain("a merge key takes mappings", place, hint)

    def pairs(self, node: yaml.MappingNode) -> dict[str, _Pair]:
        """Key and value by name: own ones win over merged ones (`<<: *base`), the first base
        over the next, as YAML's merge type says."""
        known = self.merged.get(id(node), {})
        if known is None:  # being read: a merge of itself
            self.complain("a merge key takes the mapping that it stands in", self.place(node))
            return {}
        if known:
            return known
        self.merged[id(node)] = None
        merged: dict[str, _Pair] = {}
        own: dict[str, _Pair] = {}
        for key, value in node.value:
            if key.tag == MERGE:
                parents = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for parent in parents:
                    if isinstance(parent, yaml.MappingNode):
                        merged = self.pairs(parent) | merged
            elif isinstance(key, yaml.ScalarNode):
                own.setdefault(key.value, (key, value))
        self.merged[id(node)] = merged | own
        return merged | own
