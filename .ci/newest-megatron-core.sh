#!/usr/bin/env bash
# Runs the training and oracle tests with the newest megatron-core, which needs Python 3.12.
# The interpreter is found on PATH or through pyenv; without one this says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  if python3.12 -c pass 2> /dev/null; then
    command -v python3.12
  elif command -v pyenv > /dev/null; then
    local version
    version=$(pyenv versions --bare | grep -E '^3\.12(\.|$)' | tail -n 1) || return 1
    PYENV_VERSION=$version pyenv which python3.12
  else
    return 1
  fi
}

if ! python=$(find_python); then
  echo "no Python 3.12 on PATH or in pyenv: the newest megatron-core is not tested"
  exit 0
fi
venv=.venv-newest
if [ ! -f "$venv/.installed" ]; then
  echo "installing the newest megatron-core into $venv, once (several GB)"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[train,test]'
  touch "$venv/.installed"
fi
"$venv/bin/python" -m pytest -m "train and not gpu and not slurm"
