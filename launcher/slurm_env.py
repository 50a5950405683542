"""What a job must not inherit from the shell that submits it."""

from __future__ import annotations

from collections.abc import Mapping

# A job submitted from inside a job, or from a shell with SBATCH_* defaults, must not inherit
# them: they override #SBATCH lines or contradict them. SLURM_CONF says which cluster this is.
_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI", "TORCHELASTIC_")
_NAMES = frozenset(
    "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK "
    "GROUP_RANK ROLE_RANK".split()
)
_KEPT = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER"))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The submit environment without what would leak into the job's own Slurm settings."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name.startswith(_PREFIXES) or name in _NAMES)
    }
