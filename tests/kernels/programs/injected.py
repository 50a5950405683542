"""Runs a script with LoRA installed, as the rank runner does: injected.py SETTINGS SCRIPT ARGS...

SETTINGS is the `lora` section as JSON. What is reported goes to stderr, one JSON line a chunk.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from mtlaunch.kernels.inject import install


def main() -> None:
    settings, script = json.loads(sys.argv[1]), sys.argv[2]
    install(settings, lambda found: print("REPORT " + json.dumps(found), file=sys.stderr))
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
