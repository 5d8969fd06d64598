#!/usr/bin/env bash
# test.sh [PART...]
#
# Runs all tests, or some parts of them: build static vet race vm demo. Says
# how long each part took, which transports were tested, and what was skipped
# and why. Ends at the first part that fails, with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin:/usr/sbin:/sbin

tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvt.XXXXXX")
running= # the process group of the part that runs
finish() {
	trap '' INT TERM
	if [ -n "$running" ]; then
		kill -TERM -- "-$running" 2>/dev/null || true
		# All of it, before its files go: a cluster finds its nodes by them.
		local until=$((SECONDS + 30))
		while kill -0 -- "-$running" 2>/dev/null && [ "$SECONDS" -lt "$until" ]; do
			sleep 0.1
		done
	fi
	rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
notes=$tmp/notes # what the last lines say
: >"$notes"

fail() {
	echo "test: $*" >&2
	return 1
}

# ---- build: the binary as it is shipped, and everything without a tag.
part_build() {
	go build ./...
	go build -trimpath -tags "$(scripts/tags.sh)" -o bin/kvferry ./cmd/kvferry
	bin/kvferry version
}

# ---- static: without a C compiler.
part_static() {
	CGO_ENABLED=0 go build -trimpath -o "$tmp/kvferry" ./cmd/kvferry
	"$tmp/kvferry" version >/dev/null
}

# ---- vet: what the compiler lets pass, and the import table.
part_vet() {
	go vet ./...
	go test -count=1 ./internal/layers
}

# readable turns the output of go test -v into what a person reads: one line a
# package, every skip with its reason, and what a failed test said: the last 60
# lines of it, or of its package if no test is to blame.
readable() {
	awk -v most=60 '
		function last(text, title,   lines, n, i) {
			n = split(text, lines, "\n") - 1
			print "---- " title
			if (n > most) print "  (" n - most " lines before these, of which:"
			for (i = 1; i <= n - most; i++) if (lines[i] ~ /_test\.go:[0-9]+: / && lines[i] !~ /level=/) print lines[i]
			if (n > most) print "  )"
			for (i = n > most ? n - most + 1 : 1; i <= n; i++) print lines[i]
		}
		/^[ \t]*=== (RUN|PAUSE|CONT|NAME)/ { test = $3; next }
		/^[ \t]+[A-Za-z0-9_]+_test\.go:[0-9]+: / { said[test] = $0; sub(/^[ \t]+/, "", said[test]) }
		/^[ \t]*--- PASS: / { next }
		/^[ \t]*--- SKIP: / { skips = skips "  skipped " $3 ": " said[$3] "\n"; next }
		/^[ \t]*--- FAIL: / { failed[++fails] = $3; next }
		/^(ok|FAIL|\?)[ \t]/ {
			if ($1 == "FAIL") {
				for (i = 1; i <= fails; i++) if (by[failed[i]] != "") last(by[failed[i]], failed[i])
				if (!fails) last(chunk, $2)
			}
			print; printf "%s", skips; fflush()
			chunk = skips = test = ""; fails = 0; split("", said); split("", by); next
		}
		/^(FAIL|PASS|exit status .*)$/ { next }
		{ chunk = chunk $0 "\n"; by[test] = by[test] $0 "\n" }
		END { if (chunk != "") last(chunk, "without a package") }'
}

# ---- race: every test, under the race detector.
part_race() {
	local log=$tmp/race.log tested=$tmp/tested status=0
	: >"$tested"
	KVFERRY_TESTED_FILE=$tested go test -race -v -timeout 15m -tags "$(scripts/tags.sh)" ./... 2>&1 |
		tee "$log" | readable || status=$?
	[ "$status" -eq 0 ] || return "$status"
	sort -u "$tested" | paste -sd' ' | sed 's/^/transports tested: /' >>"$notes"
	sed -n 's/^ *\(rdma\|cuda\)_test\.go:[0-9]*: .*reason /not on this machine: /p' "$log" | grep -v 'nil>$' >>"$notes" || true
	# These need nothing but the kernel.
	local transport
	for transport in memory shm tcp; do
		grep -qx "$transport" "$tested" || fail "the transport $transport can run here and was not tested"
	done
}

# ---- vm: the static binary and tests of devices in a throw-away machine.
part_vm() {
	if [ "$(uname -m)" != x86_64 ]; then
		echo "VM NOT TESTED: scripts/vm.sh boots x86_64 only, this is $(uname -m)" | tee -a "$notes"
		return
	fi
	local status=0
	scripts/deps.sh --check test || status=$?
	case $status in
	0) ;;
	1) fail "the machine could run the VM: run scripts/deps.sh first" ;;
	*)
		echo "VM NOT TESTED: what stands above is missing, and cannot be installed from here" | tee -a "$notes"
		return
		;;
	esac
	[ -x "$tmp/kvferry" ] || part_static
	local package files=$tmp/kvferry:/root/kvferry
	for package in internal/memory transfer/shm transfer/tcp rdma; do
		CGO_ENABLED=0 go test -c -o "$tmp/${package##*/}.test" "./$package"
		files+=" $tmp/${package##*/}.test:/root/${package##*/}.test"
	done
	# With huge pages, which the host may not have: the test must not skip there.
	KVFERRY_VM_TIMES=1 KVFERRY_VM_TIMEOUT=180 KVFERRY_VM_HUGE=16 KVFERRY_VM_FILES=$files scripts/vm.sh sh -c '
		set -e
		./kvferry version
		./memory.test -test.short
		./memory.test -test.v -test.run "^TestHugePagesAreUsed$" | grep -e "--- PASS"
		./shm.test -test.run "TestSuite$"
		./tcp.test -test.run "TestSuite$"
		KVFERRY_RDMA_DEVICE=rxe0 ./rdma.test'
}

# nothing_left fails if a process or a file of the demo is still there.
nothing_left() { # DIRECTORY
	local left
	left=$(find "$1" -mindepth 1)
	[ -z "$left" ] || fail "the demo left files behind: $left"
	left=$(grep -lsz -- "^XDG_RUNTIME_DIR=$1/" /proc/[0-9]*/environ || true)
	[ -z "$left" ] || fail "the demo left processes behind: $left"
}

# ---- demo: as a newcomer runs it, and interrupted.
part_demo() {
	local dir=$tmp/d out=$tmp/demo.out pid status=0
	[ -x bin/kvferry ] || part_build
	mkdir -p "$dir"
	TMPDIR=$dir make -s demo
	nothing_left "$dir"

	TMPDIR=$dir make -s demo >"$out" 2>&1 &
	pid=$!
	local until=$((SECONDS + 60))
	until grep -q 'nodes ready' "$out"; do
		kill -0 "$pid" 2>/dev/null || break
		[ "$SECONDS" -lt "$until" ] || break
		sleep 0.1
	done
	kill -TERM "$pid" 2>/dev/null || true
	wait "$pid" || status=$?
	[ "$status" -ne 0 ] || fail "an interrupted demo ended with status 0: $(cat "$out")"
	grep -q 'nodes ready' "$out" || fail "the demo never came up: $(cat "$out")"
	nothing_left "$dir"
	echo "interrupted after it came up: status $status, nothing left behind"

	# Twice within a moment, as make and a terminal do, at any time.
	local n
	for n in 1 2 3 4 5; do
		TMPDIR=$dir scripts/with-cluster.sh --prefill 1 --decode 1 -- members --watch=50ms >"$out" 2>&1 &
		pid=$! status=0
		sleep "0.$((RANDOM % 9 + 1))"
		kill -TERM "$pid"
		sleep "0.000$((RANDOM % 4 + 1))"
		kill -TERM "$pid" 2>/dev/null || true
		wait "$pid" || status=$?
		[ "$status" -eq 143 ] || fail "interrupted twice: status $status, want 143: $(cat "$out")"
		nothing_left "$dir"
	done
	echo "interrupted twice, $n times: nothing left behind"
}

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(build static vet race vm demo)
times=()
for part in "${parts[@]}"; do
	declare -F "part_$part" >/dev/null || {
		sed -n '4,6s/^# //p' "$0" >&2
		exit 2
	}
	echo "== $part"
	begin=$SECONDS status=0
	# In a process group of its own, so that an interrupted part takes all
	# that it started with it; in the background, so that set -e holds inside.
	set -m
	(trap - EXIT INT TERM && "part_$part") &
	running=$!
	set +m
	wait "$running" || status=$?
	running=
	times+=("$part $((SECONDS - begin)) s")
	if [ "$status" -ne 0 ]; then
		echo "test: part $part FAILED after $((SECONDS - begin)) s (alone: scripts/test.sh $part)" >&2
		exit 1
	fi
done
cat "$notes"
printf -v list '%s, ' "${times[@]}"
echo "all parts passed: ${list%, }"
