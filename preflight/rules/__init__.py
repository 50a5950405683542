"""One module a family; a rule is found by its registration (see `mtlaunch.preflight.rule`)."""
