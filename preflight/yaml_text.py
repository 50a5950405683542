"""YAML as plain data with the place of every key and value.

PyYAML follows YAML 1.1, where `12:30:00` is 45000, `012` is 10 and `1e3` is text, and lets the
last of two equal keys win. People mean other things in a job file, so scalars are resolved here,
from the composed nodes, and the source text of each is kept for fields that want it as typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

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

    Raises JobFileError with a place for syntax errors, duplicate keys, keys that are not text,
    and tags other than `!!str`.
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
    problems: list[Problem] = []
    document.data = _construct(root, (), document, problems) if root is not None else None
    if problems:
        raise JobFileError(problems, text)
    return document


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _construct(node: yaml.Node, path: Path, document: Document, problems: list[Problem]) -> Any:
    document.values[path] = _place(node, document.file)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document, problems)
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(item, (*path, index), document, problems)
            for index, item in enumerate(node.value)
        ]
    assert isinstance(node, yaml.ScalarNode)
    if node.style:  # quoted or a block: text
        return node.value
    if not node.tag.startswith("tag:yaml.org,2002:"):
        place = document.values[path]
        problems.append(Problem(f"the tag {node.tag} is not supported", place, "quote the value"))
        return None
    document.texts[path] = node.value
    return resolve_plain(node.value)


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
    """Key, value, and whether the pair came in through a merge key (`<<: *base`)."""
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            parents = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for parent in parents:
                if isinstance(parent, yaml.MappingNode):
                    yield from ((k, v, True) for k, v, _ in _pairs(parent))
        else:
            yield key, value, False


def _mapping(
    node: yaml.MappingNode, path: Path, document: Document, problems: list[Problem]
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    own: dict[str, Place] = {}
    # Merged pairs first: a key of the mapping itself wins over them.
    for key, value, merged in sorted(_pairs(node), key=lambda pair: not pair[2]):
        place = _place(key, document.file)
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem("a key must be text", place))
            continue
        name = key.value
        if not merged and name in own:
            first = own[name]
            problems.append(
                Problem(
                    f"duplicate key '{name}' (first on line {first.line})",
                    place,
                    "keep one of the two",
                )
            )
            continue
        if not merged:
            own[name] = place
        inner: Path = (*path, name)
        document.keys[inner] = place
        data[name] = _construct(value, inner, document, problems)
    return data
