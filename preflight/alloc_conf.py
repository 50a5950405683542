"""PyTorch's CUDA allocator settings, read as PyTorch reads them.

Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp: a comma list of
`key:value`, blanks around items stripped; `expandable_segments` takes `True` or `False` only.
"""

from __future__ import annotations

import re

NAME = "PYTORCH_CUDA_ALLOC_CONF"
NEW_NAME = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments"
EXPANDABLE_ON = "expandable_segments:True"


def options(value: str) -> dict[str, str]:
    """Options in order, the last of two equal keys winning, as in PyTorch.

    Commas inside brackets belong to the value (`roundup_power2_divisions:[256:1,512:2]`).

    >>> options(" max_split_size_mb:512, expandable_segments:True")
    {'max_split_size_mb': '512', 'expandable_segments': 'True'}
    """
    found: dict[str, str] = {}
    for item in re.split(r",(?![^\[]*\])", value):
        key, _, setting = item.strip().partition(":")
        if key.strip():
            found.pop(key.strip(), None)
            found[key.strip()] = setting.strip()
    return found


def text(settings: dict[str, str]) -> str:
    return ",".join(f"{key}:{value}" if value else key for key, value in settings.items())


def expandable(value: str) -> bool:
    return options(value).get(EXPANDABLE) == "True"


def rejected(value: str) -> str | None:
    """The `expandable_segments` setting that PyTorch refuses to parse, if there is one."""
    setting = options(value).get(EXPANDABLE)
    return setting if setting is not None and setting not in ("True", "False") else None
