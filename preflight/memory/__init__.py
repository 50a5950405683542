"""Memory of every pipeline rank of a Plan, without a GPU and without torch."""

from mtlaunch.preflight.memory.total import Estimate, RankEstimate, estimate

__all__ = ["Estimate", "RankEstimate", "estimate"]
