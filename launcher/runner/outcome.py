"""How a job can end, in words that the command line and the payload share.

Here, because the runner may not import the rest of the launcher; and without imports, because the
command line starts with it.
"""

# States after which nothing changes any more: squeue(1), JOB STATE CODES. A positive list,
# because SUSPENDED, CONFIGURING, RESIZING, REQUEUE_HOLD, SIGNALING and STOPPED are not the end.
FINAL_STATES = frozenset(
    """BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED
    TIMEOUT""".split()
)

# The script's exit code when its ranks saved and left before the time limit: no finished
# training. errno ERESTART, "interrupted system call should be restarted".
EXIT_NEAR_LIMIT = 85
