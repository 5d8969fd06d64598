#!/usr/bin/env bash
# with-cluster.sh [FLAGS OF "kvferry local up"...] -- KVFERRY-COMMAND [ARGS...]
#
# Runs one command of bin/kvferry with a local cluster of its own, and leaves no
# process, socket, or file of it behind, also when it is interrupted. Exits with
# the command's status; 130 or 143 if interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."

up=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	up+=("$1")
	shift
done
[ $# -ge 2 ] || {
	sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
	exit 2
}
shift

# A runtime directory of its own: short, because the paths of sockets are, and
# gone at the end with all that is in it.
XDG_RUNTIME_DIR=$(mktemp -d "${TMPDIR:-/tmp}/kvferry.XXXXXX")
export XDG_RUNTIME_DIR
child=

# run starts a command in the background, so that a signal to this script is
# handled at once and not when the command has ended.
run() {
	local status=0
	bin/kvferry "$@" &
	child=$!
	wait "$child" || status=$?
	child=
	return "$status"
}

finish() {
	local status=$?
	trap '' INT TERM HUP
	trap - EXIT
	if [ -n "$child" ]; then
		kill -TERM "$child" 2>/dev/null || true
		wait "$child" 2>/dev/null || true
	fi
	bin/kvferry local down >/dev/null || status=1
	rm -rf "$XDG_RUNTIME_DIR"
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

run local up "${up[@]}"
run "$@"
