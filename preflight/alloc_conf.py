"""PyTorch's CUDA allocator settings, read as PyTorch reads them.

Source: c10/core/AllocatorConfig.h ConfigTokenizer, AllocatorConfig.cpp and
c10/cuda/CUDAAllocatorConfig.cpp: a comma list of `key:value`, all blanks dropped, also those inside
a word; every item is parsed, and `expandable_segments` takes `True` or `False` only.
"""

from __future__ import annotations

import re

NAME = "PYTORCH_CUDA_ALLOC_CONF"
NEW_NAME = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments"
EXPANDABLE_ON = "expandable_segments:True"


def _items(value: str) -> list[tuple[str, str]]:
    bare = "".join(value.split())
    parts = (item.partition(":") for item in re.split(r",(?![^\[]*\])", bare))
    return [(key, setting) for key, _, setting in parts if key]


def options(value: str) -> dict[str, str]:
    """Options in order, the last of two equal keys winning, as in PyTorch.

    Commas inside brackets belong to the value (`roundup_power2_divisions:[256:1,512:2]`).

    >>> options(" max_split_size_mb:512, expandable_segments:True")
    {'max_split_size_mb': '512', 'expandable_segments': 'True'}
    """
    found: dict[str, str] = {}
    for key, setting in _items(value):
        found.pop(key, None)
        found[key] = setting
    return found


def text(settings: dict[str, str]) -> str:
    return ",".join(f"{key}:{value}" if value else key for key, value in settings.items())


def expandable(value: str) -> bool:
    return options(value).get(EXPANDABLE) == "True"


def rejected(value: str) -> str | None:
    """The first `expandable_segments` setting that PyTorch refuses to parse, if there is one.

    It parses all of them, before the last one counts.

    >>> rejected("expandable_segments:1,expandable_segments:True"), rejected("a:1")
    ('1', None)
    """
    for key, setting in _items(value):
        if key == EXPANDABLE and setting not in ("True", "False"):
            return setting
    return None
