#!/usr/bin/env bash
# Replay dead letters of one environment: scripts/replay-dlq.sh ENV [options of `oncewire dlq replay`].
# ENV is dev or prod; the servers are those of NATS_URL, else of .env.ENV beside you (lines NAME=value), else local ones.
set -euo pipefail

usage() {
    echo "usage: $0 dev|prod [LETTER…] [--dry-run] [--rate N] [--cause NAME] [--since 2h] …" >&2
    echo "       looks first: $0 ENV --all --dry-run" >&2
    exit 2
}

[ $# -ge 1 ] || usage
env_name=$1
shift
case $env_name in
    dev | prod) ;;
    *) usage ;;
esac

file=".env.$env_name"
if [ -z "${NATS_URL:-}" ] && [ -f "$file" ]; then
    set -a
    # shellcheck disable=SC1090
    . "./$file"
    set +a
fi
if [ "$env_name" = prod ] && [ -z "${NATS_URL:-}" ]; then
    echo "error: NATS_URL is not set, and there is no $file: which servers are prod?" >&2
    exit 2
fi
export ONCEWIRE_ENV=$env_name
exec "${ONCEWIRE:-oncewire}" dlq replay "$@"
