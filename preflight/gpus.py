"""GPUs by the names people use in job files.

`capacity_bytes` is what the driver reports to a process (`torch.cuda.mem_get_info()[1]`, "total
capacity of ... GiB" in PyTorch's out-of-memory message), which is less than the name's number.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row: capability as (major, minor); NVLink domain and node size in GPUs."""

    name: str
    capacity_bytes: int
    compute_capability: tuple[int, int]
    nvlink_domain: int
    gpus_per_node: int
    source: str

    @property
    def blackwell(self) -> bool:
        return self.compute_capability[0] >= 10


def _gpu(
    name: str, gib: float, capability: tuple[int, int], domain: int, node: int, source: str
) -> Gpu:
    return Gpu(name, int(gib * GIB), capability, domain, node, source)


# Capacities are read off public logs; they vary a little with driver and ECC. Most logs do not
# name the card: it follows from the number.
OOM = 'GiB in "GPU 0 has a total capacity of ..." messages of PyTorch: '

# Compute capabilities: https://developer.nvidia.com/cuda-gpus. NVLink domains: DGX/HGX (8) and
# GB200/GB300 NVL72 (72, four GPUs a compute tray) datasheets.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("V100-16GB", 15.77, (7, 0), 8, 8, OOM + "15.77 to 15.78"),
        _gpu("V100-32GB", 31.74, (7, 0), 8, 8, OOM + "31.73 to 31.74"),
        _gpu("A100-40GB", 39.39, (8, 0), 8, 8, OOM + "39.25 to 39.59"),
        _gpu("A100-80GB", 79.15, (8, 0), 8, 8, OOM + "79.14 to 79.33"),
        _gpu("A800-80GB", 79.15, (8, 0), 8, 8, "as A100-80GB"),
        _gpu("L40S-48GB", 44.39, (8, 9), 1, 8, OOM + "44.34 to 44.67, ECC on"),
        _gpu("H100-80GB", 79.10, (9, 0), 8, 8, OOM + "79.10 to 79.33"),
        _gpu("H800-80GB", 79.10, (9, 0), 8, 8, "as H100-80GB"),
        _gpu("H100-96GB", 94.5, (9, 0), 1, 4, OOM + "94.50 (GH200)"),
        _gpu("H200-141GB", 139.81, (9, 0), 8, 8, OOM + "139.72 to 139.81"),
        _gpu("H20-96GB", 95.22, (9, 0), 8, 8, OOM + "95.00 to 95.22"),
        _gpu("B200-192GB", 178.35, (10, 0), 8, 8, OOM + "178.35 to 178.36"),
        _gpu("GB200-192GB", 184.31, (10, 0), 72, 4, OOM + "184.31"),
        _gpu("B300-288GB", 267.69, (10, 3), 8, 8, OOM + "267.69"),
        _gpu("GB300-288GB", 276.5, (10, 3), 72, 4, OOM + "276.50"),
    )
}

_ALIASES = {
    "A100": "A100-80GB",
    "H100": "H100-80GB",
    "H800": "H800-80GB",
    "A800": "A800-80GB",
    "H200": "H200-141GB",
    "H20": "H20-96GB",
    "B200": "B200-192GB",
    "B200-180GB": "B200-192GB",
    "GB200": "GB200-192GB",
    "GB200-186GB": "GB200-192GB",
    "B300": "B300-288GB",
    "GB300": "GB300-288GB",
    "L40S": "L40S-48GB",
}


def find_gpu(name: str) -> Gpu | None:
    """The row for a name in any letter case, with or without "NVIDIA", "SXM" and the like."""
    word = name.upper().replace("NVIDIA", "").replace("_", "-").replace(" ", "-").strip("-")
    for form in ("-SXM4", "-SXM5", "-SXM", "-HBM3E", "-HBM3", "-NVL72"):
        word = word.replace(form, "")
    return GPUS.get(_ALIASES.get(word, word))


def nearest_gpus(name: str) -> list[str]:
    return difflib.get_close_matches(name.upper(), GPUS, 3, 0.4) or list(GPUS)
