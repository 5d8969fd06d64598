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

ended= # the status to end with, once a signal has come
child= # what runs, until the signal has been passed on to it

# A signal ends nothing here by itself: it is noted, and passed on to what runs.
# Only the first one counts, so that a second one, from a group or a make that
# passes its own on, stops neither the command nor us half way.
interrupt() { # STATUS
	[ -z "$ended" ] || return 0
	ended=$1
	pass_on
}
pass_on() {
	[ -n "$ended" ] && [ -n "$child" ] || return 0
	local to=$child
	child=
	kill -TERM "$to" 2>/dev/null || true
}

# finish stops what is left. Nothing interrupts it: signals are ignored, and
# those of the terminal do not reach another session.
finish() {
	local status=$?
	trap '' INT TERM HUP
	setsid bin/kvferry local down >/dev/null || status=1
	rm -rf "$XDG_RUNTIME_DIR"
	exit "${ended:-$status}"
}

# run runs a command in the background, so that a signal is handled at once and
# not when the command has ended, and in a session of its own, so that it gets
# a signal once, from us.
run() {
	[ -z "$ended" ] || exit "$ended"
	local status=0 pid
	setsid bin/kvferry "$@" &
	pid=$! child=$!
	pass_on # what came before it was known
	# A signal ends a wait.
	until wait "$pid"; do
		status=$?
		kill -0 "$pid" 2>/dev/null || break
		status=0
	done
	child=
	[ -z "$ended" ] || exit "$ended"
	return "$status"
}

trap 'interrupt 130' INT
trap 'interrupt 143' TERM
trap 'interrupt 129' HUP
# A runtime directory of its own: short, because the paths of sockets are, and
# gone at the end with all that is in it.
XDG_RUNTIME_DIR=$(mktemp -d "${TMPDIR:-/tmp}/kvferry.XXXXXX")
export XDG_RUNTIME_DIR
trap finish EXIT

run local up "${up[@]}" >&2 # what the command prints is the output
run "$@"
