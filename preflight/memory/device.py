"""What a process holds outside PyTorch's allocated memory: context, NCCL, fragmentation."""

from __future__ import annotations

from dataclasses import dataclass

from mtlaunch.preflight.environment import expandable_segments_on
from mtlaunch.preflight.memory.sizes import Sizes

KIB = 2**10
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Span:
    """A number of bytes with its bounds."""

    low: int
    likely: int
    high: int

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.likely + other.likely, self.high + other.high)


NOTHING = Span(0, 0, 0)

# CUDA context with PyTorch's, Transformer Engine's and cuDNN's kernels. Lazy loading (CUDA 11.7
# and newer) starts near 0.3 GiB and grows with the kernels used; published nvidia-smi readings of
# training processes are 0.3 to 0.6 GiB. Not measured by this project.
CONTEXT = Span(300 * MIB, 450 * MIB, 650 * MIB)

# One NCCL connection: a buffer for each protocol (nccl src/include/comm.h, src/init.cc): Simple
# NCCL_BUFFSIZE 4 MiB, LL 512 lines * 8 threads * 8 steps * 16 B = 512 KiB, LL128 120 * 640 * 8 *
# 8 B = 4.7 MiB.
NCCL_CONNECTION = 4 * MIB + 512 * KIB + 120 * 640 * 8 * 8

# Connections a communicator has per rank: channels times receiving peers. Two channels is what
# NCCL opens over one network card; a ring over NVLink has 16 to 24; ring and tree of 32 channels
# is the most. NCCL 2.22 and newer connect only what is used.
NCCL_CONNECTIONS = (2, 16, 64)

# Reserved but unusable memory as a share of the allocated peak. NVIDIA's Megatron-Bridge memory
# guide gives "often 2-10 GB effective" around a 58.8 GB peak and that expandable segments remove
# it; what they leave is rounding to 2 MiB pages and freed blocks between live ones. Without them
# the allocator gives cached blocks back before it fails, so a lucky job loses nothing.
FRAGMENTED = (0.0, 2 / 58.8, 10 / 58.8)
FRAGMENTED_EXPANDABLE = (0.0, 0.5 / 58.8, 2 / 58.8)


def context(s: Sizes) -> Span:
    """The CUDA context; nothing for ranks without a GPU."""
    return CONTEXT if s.on_gpu else NOTHING


def communicators(s: Sizes) -> int:
    """Process groups of more than one rank that exchange data: world, TP, CP, DP, PP, experts."""
    plan = s.plan
    sizes = [plan.world_size, plan.tp, plan.cp, s.dp * plan.cp, plan.pp]
    if plan.num_experts:
        sizes += [plan.ep * plan.etp, s.edp]
    return sum(size > 1 for size in sizes)


def nccl(s: Sizes) -> Span:
    """NCCL's buffers: communicators * connections * 9.2 MiB."""
    if not s.on_gpu:
        return NOTHING
    one = communicators(s) * NCCL_CONNECTION
    low, likely, high = NCCL_CONNECTIONS
    return Span(low * one, likely * one, high * one)


def fragmentation(s: Sizes, peak: int, high: int) -> Span:
    """Reserved minus allocated memory at the peak; `high` is the peak's upper bound."""
    if not s.on_gpu:
        return NOTHING
    share = FRAGMENTED_EXPANDABLE if expandable_segments_on(s.plan) else FRAGMENTED
    return Span(0, int(share[1] * peak), int(share[2] * high))
