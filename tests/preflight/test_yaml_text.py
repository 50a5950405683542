"""YAML: merge keys, aliases, and texts that were made to break a reader."""

from __future__ import annotations

from typing import Any

import pytest

from mtlaunch.preflight import jobfile
from mtlaunch.preflight.yaml_text import MOST_VALUES, JobFileError, Problem, read


def problem(text: str) -> Problem:
    """The one problem of a text, whether the rest could be read or not."""
    try:
        problems = read(text, "job.yaml").problems
    except JobFileError as error:
        problems = error.problems
    [one] = problems
    return one


def test_an_own_value_wins_over_a_merged_one_also_as_typed() -> None:
    text = 'env: &e {A: 1, B: 012, C: 07}\ncluster: {env: {<<: *e, A: "2", B: "x"}}\n'
    content = jobfile.parse(text).content
    assert content.cluster.env == {"A": "2", "B": "x", "C": "07"}  # type: ignore[union-attr]
    document = read(text, "job.yaml")
    assert ("cluster", "env", "A") not in document.texts
    assert document.place(("cluster", "env", "A")).line == 2
    assert document.place(("cluster", "env", "C")).line == 1


def test_a_merged_mapping_leaves_no_places_behind() -> None:
    text = "a: &a {x: {deep: 1}}\nb: {<<: *a, x: 2}\n"
    document = read(text, "job.yaml")
    assert document.data["b"] == {"x": 2}
    for places in (document.keys, document.values, document.texts):
        assert ("b", "x", "deep") not in places


@pytest.mark.parametrize(
    "merged, data",
    [
        ("<<: [*a, *b]", {"x": 1, "y": 3}),
        ("<<: [*b, *a]", {"x": 2, "y": 3}),
        ("z: 1, <<: *b, x: 5", {"x": 5, "y": 3, "z": 1}),
        ("<<: *c", {"x": 9, "y": 3}),
        ("<<: [*a, *c]", {"x": 1, "y": 3}),
    ],
)
def test_the_first_of_several_bases_wins(merged: str, data: dict[str, Any]) -> None:
    text = f"a: &a {{x: 1}}\nb: &b {{x: 2, y: 3}}\nc: &c {{x: 9, <<: *b}}\nd: {{{merged}}}\n"
    assert read(text, "job.yaml").data["d"] == data


@pytest.mark.parametrize(
    "text, column",
    [("args: &a {x: *a}", 11), ("args: &a [1, *a]", 7), ("args: &a {<<: *a, y: 1}", 7)],
)
def test_an_alias_of_itself(text: str, column: int) -> None:
    assert (problem(text).place.line, problem(text).place.column) == (1, column)


def test_a_merge_of_no_mapping() -> None:
    assert problem("a: {<<: 5}").message == "a merge key takes mappings"


def bomb(line: str) -> str:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level} " + line.format(", ".join([f"*a{level - 1}"] * 10)))
    return "\n".join(lines)


def test_aliases_that_multiply() -> None:
    assert f"{MOST_VALUES:,}" in problem(bomb("[{}]")).message
    assert problem(bomb("[{}]")).place.line > 0
    assert read(bomb("{{<<: [{}]}}"), "job.yaml").data["a9"] == {"x": 1}


def test_deep_nesting() -> None:
    assert "deeper than" in problem("a: " + "[" * 900 + "]" * 900).message
    assert read("a: " + "[" * 50 + "]" * 50, "job.yaml").data
