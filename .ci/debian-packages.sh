#!/usr/bin/env bash
# Installs the Debian packages that the tests use, as far as they are missing: a real Slurm with
# accounting (tests/slurm_cluster.py starts the daemons itself) and shellcheck.
set -euo pipefail

packages=(slurm-wlm slurmdbd munge mariadb-server shellcheck)

say() { printf 'debian-packages: %s\n' "$*"; }

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    say "no apt-get here, nothing done"
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $state == installed ]] || missing+=("$package")
done

if ((${#missing[@]} == 0)); then
    say "all there: ${packages[*]}"
    exit 0
fi
if ((EUID != 0)); then
    say "not root, so not installed: ${missing[*]} (the tests that need them are skipped)"
    exit 0
fi

# A service that starts on installation would only be in the way. Where no policy is set yet,
# set one for the time of the installation.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
say "installing: ${missing[*]}"
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
say "done"
