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
	[ -z "$running" ] || kill -TERM -- "-$running" 2>/dev/null || true
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
# package, every skip with its reason, and all that a failed package said.
readable() {
	awk '
		/^[ \t]*(=== (RUN|PAUSE|CONT|NAME)|--- PASS)/ { next }
		/^[ \t]+[A-Za-z0-9_]+_test\.go:[0-9]+: / { said = $0; sub(/^[ \t]+/, "", said) }
		/^[ \t]*--- SKIP: / { skips = skips "  skipped " $3 ": " said "\n" }
		/^(ok|FAIL|\?)[ \t]/ {
			if ($1 == "FAIL") printf "%s", chunk
			print; printf "%s", skips; fflush()
			chunk = skips = said = ""; next
		}
		{ chunk = chunk $0 "\n" }
		END { printf "%s", chunk }'
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
	# These two need nothing but the kernel.
	local transport
	for transport in memory tcp; do
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
	for package in internal/memory transfer/tcp rdma; do
		CGO_ENABLED=0 go test -c -o "$tmp/${package##*/}.test" "./$package"
		files+=" $tmp/${package##*/}.test:/root/${package##*/}.test"
	done
	KVFERRY_VM_TIMES=1 KVFERRY_VM_TIMEOUT=180 KVFERRY_VM_FILES=$files scripts/vm.sh sh -c '
		set -e
		./kvferry version
		./memory.test -test.short
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
