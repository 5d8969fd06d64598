#!/usr/bin/env bash
# starve.sh CMD...: runs CMD as a machine does that has no time for it: every 1 to 4
# seconds all its processes stand still for 0.3 to 2. What fails then depends on
# the speed of the machine. Ends with the status of CMD. Linux, as root: SIGSTOP
# would be in the way of tests that stop processes themselves.
set -euo pipefail
[ $# -gt 0 ] || {
	sed -n '2,5s/^# //p' "$0" >&2
	exit 2
}

# With cgroups of version 2, or of version 1.
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
	group=/sys/fs/cgroup/starve.$$ switch=cgroup.freeze stop=1 go=0
else
	group=/sys/fs/cgroup/freezer/starve.$$ switch=freezer.state stop=FROZEN go=THAWED
fi
mkdir "$group" || {
	echo "starve: freezing processes takes root, and a cgroup hierarchy that can be written to: run it as root, outside a container that has none" >&2
	exit 1
}
thaw() { echo "$go" >"$group/$switch"; }
finish() {
	thaw
	# Whatever of it outlives CMD, and only then the group can go.
	local until=$((SECONDS + 10))
	until rmdir "$group" 2>/dev/null || [ "$SECONDS" -ge "$until" ]; do
		xargs -r kill -KILL <"$group/cgroup.procs" 2>/dev/null || true
		sleep 0.1
	done
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

(
	trap - EXIT INT TERM
	echo "$BASHPID" >"$group/cgroup.procs"
	exec "$@"
) &
pid=$!
while kill -0 "$pid" 2>/dev/null; do
	sleep "$((RANDOM % 3 + 1)).$((RANDOM % 10))"
	echo "$stop" >"$group/$switch"
	sleep "$((RANDOM % 2)).$((RANDOM % 7 + 3))"
	thaw
done
wait "$pid"
