"""`python payload/mtlaunch/launcher/runner/__main__.py RUN_DIR`: one rank of a job."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder must not shadow modules of the script; the payload's `mtlaunch` must be found.
    # (As sys.path[0], which the rank replaces by the script's folder.)
    payload = Path(__file__).resolve().parents[3]
    sys.path[0] = str(payload)
    from mtlaunch.launcher.runner.rank import main

    sys.path.insert(1, str(payload))
    main(Path(sys.argv[1]))
