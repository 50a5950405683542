"""Plan, rules, estimator and data tables: text in, text out; no torch, no I/O."""
