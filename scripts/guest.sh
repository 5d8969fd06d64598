#!/bin/sh
# guest.sh PART...: what scripts/test.sh and scripts/test-rdma.sh run inside the
# machine of scripts/vm.sh, from a directory with a copy of what they built:
# smoke suite link replay devices calls bench. By busybox's shell.
set -e
set -o pipefail
export KVFERRY_RDMA_DEVICE=rxe0,rxe1 # the owner's device, and the reader's
export KVFERRY_TESTED_FILE=/tmp/tested
export XDG_RUNTIME_DIR=/tmp/run
mkdir -p $XDG_RUNTIME_DIR
touch $KVFERRY_TESTED_FILE
V=$PWD # where what was built lies

fail() {
	echo "guest: $*" >&2
	exit 1
}
say() { echo "> $*"; } # through scripts/readable.sh

# tests PACKAGE [FLAGS...] runs its tests, as go test -v would. Here nothing may
# skip but what says why in these words.
may_skip='only the verbs double can do this|for long runs: -soak='
tests() {
	local package=$1 log=/tmp/log verdict=ok begin
	begin=$(date +%s)
	shift
	(cd "$V/$package" && "./${package##*/}.test" -test.v "$@" 2>&1) | tee $log || verdict=FAIL
	awk -v verdict=$verdict -v may="$may_skip" '
		/^[ \t]*=== (RUN|PAUSE|CONT|NAME)/ { test = $3 }
		/_test\.go:[0-9]+: / { said[test] = $0 }
		/^[ \t]*--- SKIP: / && said[$3] !~ may { print "    skipped, and may not: " $3 ": " said[$3]; bad = 1 }
		/^[ \t]*--- PASS: / { passed++ }
		END {
			if (!passed && verdict == "ok") { print "    no test has run"; bad = 1 }
			exit bad
		}' $log || verdict=FAIL
	sed 's/^/tested in the VM: /' $KVFERRY_TESTED_FILE
	printf '%s\t%s\t%d s\n' $verdict "$package $*" $(($(date +%s) - begin))
	[ $verdict = ok ]
}

# ---- smoke: about a minute, for make test.
part_smoke() {
	./kvferry.static version | sed 's/^/> /'
	may_skip='huge pages' tests internal/memory -test.short
	tests internal/memory -test.run '^TestHugePagesAreUsed$'
	tests transfer/shm -test.run 'TestSuite$'
	tests transfer/tcp -test.run 'TestSuite$'
	[ -d rdma ] || return 0 # the host has no headers
	tests rdma -test.run '^Test(ThisMachine|Device|Register|NeighboursAreMerged|LongOpsAreCut|WrongRequests|Stall|SilentPeer|Fail|Watch)$'
	tests transfer/rdmaread -test.run '^TestSuite$/./^(scattered|many_ranks|seal|pages|another_life|concurrent|out_of_range|every_third|cancelled_half|late_landing$)'
}

# ---- suite: every test of the verbs and of the transport.
part_suite() {
	tests rdma
	tests transfer/rdmaread
}

# ---- link: on one that is slow, or loses packets.
part_link() {
	tests transfer/rdmaread -test.run '^TestSuite$'
	replay 128
	/sbin/tc -s qdisc show dev v0 | sed 's/^/> /'
}

carried() { cat /sys/class/net/v1/statistics/rx_bytes; } # bytes from rxe0's link to rxe1's

up() { # FLAGS...
	./kvferry local up --prefill 1 --decode 1 "$@" >/tmp/up || fail "no cluster: $(cat /tmp/up $XDG_RUNTIME_DIR/kvferry/local/default/*/log 2>/dev/null)"
	owner=$(awk '$1 == "prefill-0" { print $3 }' /tmp/up)
}
rdma() {
	up --set transfer.transports=rdma --set transfer.require=rdma --set transfer.rdma.timeout=18 \
		--set-prefill transfer.rdma.devices=rxe0 --set-decode transfer.rdma.devices=rxe1 "$@"
}
down() { ./kvferry local down >/dev/null; }

number() { sed -n "s/^ *\"$1\": *\([0-9][0-9.e+]*\),*\$/\1/p" "$2" | head -n 1; } # KEY FILE

# count begins to count the system calls of all processes; counted prints those
# that all threads of one have made since, but for those by which Go's threads wait
# for each other and for the clock, which are as many as there is time.
waits='rt_sigreturn=15 sched_yield=24 madvise=28 nanosleep=35 getpid=39 futex=202 tgkill=234 epoll_pwait=281'
hist=/sys/kernel/tracing/events/raw_syscalls/sys_enter/hist
calls() { awk '/common_pid:/ { gsub(/[^0-9]+/, " "); print $1, $2, $3 }' $hist; } # thread, call, how often since it is counted
count() {
	[ -e $hist ] || {
		mount -t tracefs tracefs /sys/kernel/tracing
		echo 'hist:keys=common_pid,id:size=8192' >${hist%hist}trigger
	}
	calls >/tmp/before
}
counted() { # PID
	ls "/proc/$1/task" >/tmp/threads
	calls >/tmp/now
	awk -v waits="$waits" '
		BEGIN { n = split(waits, w, /[ =]/); for (i = 2; i <= n; i += 2) wait[w[i]] = 1 }
		FILENAME == "/tmp/threads" { of[$1] = 1; next }
		FILENAME == "/tmp/before" { was[$1, $2] = $3; next }
		$1 in of && !($2 in wait) { calls += $3 - was[$1, $2] }
		END { print calls + 0 }' /tmp/threads /tmp/before /tmp/now
}
idle() { # SECONDS: what the owner calls in so long without a read
	count
	sleep "$1"
	counted "$owner"
}
# none CALLS PAGES MOST: fails if so many for so many pages are more a page, which
# is what idling differs by.
none() {
	awk -v n="$1" -v pages="$2" -v most="$3" 'BEGIN { printf ">   for each page more: %.3f\n", n / pages; exit n / pages > most }' ||
		fail "$1 system calls of the owner for $2 pages: want none a page"
}

# replay TOKENS [FLAGS...]: two nodes with so many tokens a page, a trace, every
# byte checked, and seen on the link. It leaves bytes, pages, calls, rest, and took.
replay() {
	local before crossed report=/tmp/replay.json size=$1
	shift
	rdma --set arena.page_size="$size" --pages 128MiB "$@"
	rest=$(($(idle 3) / 3))
	before=$(carried)
	count
	./kvferry replay configs/traces/demo.jsonl -o json >$report 2>/tmp/progress || fail "replay over rdma: $(cat /tmp/progress $report)"
	calls=$(counted "$owner")
	crossed=$(($(carried) - before))
	down
	bytes=$(number verified_bytes $report) took=$(number elapsed_seconds $report)
	pages=$((bytes / size / 1024)) # about: the last one of a request is not full
	grep -q '"ok": true' $report || fail "replay: $(cat $report)"
	[ "$(number rdma $report)" = "$bytes" ] && [ "$bytes" -gt 0 ] || fail "not all of $bytes bytes came by rdma: $(cat $report)"
	[ "$crossed" -ge "$bytes" ] || fail "the link carried $crossed bytes, and $bytes were read"
	say "replay over rdma: $(number requests $report) requests, $bytes bytes in $pages pages verified in $took s; the link carried $crossed"
	say "  system calls of the owner meanwhile: $calls; idle, $rest a second"
}

# ---- replay: once, and with the same tokens in eight times as many pages, for
# which the owner makes no more system calls.
part_replay() {
	local few
	replay 128
	few="$calls $rest $took $pages"
	replay 16
	# Less what the owner would have made without a read.
	none $(echo "$few $calls $rest $took $pages" | awk '{ print ($5 - $6 * $7) - ($1 - $2 * $3), $8 - $4 }') 0.2
}

# ---- devices: the same between arenas in the memory of emulated GPUs, which
# Soft-RoCE cannot reach: both sides stage.
part_devices() {
	export KVFERRY_ARENA_CUDA_LIBRARY="$V/libcuda.so.1"
	replay 128 --set arena.memory=cuda:0 --set arena.cuda_library="$KVFERRY_ARENA_CUDA_LIBRARY"
	unset KVFERRY_ARENA_CUDA_LIBRARY
}

# ---- calls: what reading alone costs the owner's process: nothing a page.
part_calls() {
	local rest few many page=16 # tokens
	rdma --set arena.page_size=$page --pages 128MiB
	./kvferry --node prefill-0 publish few --tokens $((1000 * page)) >/dev/null
	./kvferry --node prefill-0 publish many --tokens $((7000 * page)) >/dev/null
	rest=$(idle 6)
	few=$(window few) many=$(window many)
	down
	[ "$rest" -gt 0 ] || fail "an idle node makes no system calls: the count shows nothing"
	say "system calls of the owner in 6 s: $rest idle, $few while 1000 pages are read, $many while 7000 are"
	none $((many - few)) 6000 0.05
}
window() { # REQUEST
	count
	timeout 6 ./kvferry --node decode-0 retrieve "$1" --verify >/tmp/retrieved 2>&1 &
	sleep 6
	counted "$owner"
	wait $! || fail "retrieve $1: $(cat /tmp/retrieved)"
}

# ---- bench: between two processes, beside ib_read_bw of the same devices. What is
# missed is told; what is not measured fails.
part_bench() {
	local report=/tmp/bench
	ibv_devinfo -d rxe0 | grep -E 'active_mtu|state' | sed 's/^[ \t]*/> /'
	./kvferry bench --part pull --transport rdma --device rxe1,rxe0 --chunk 16384,65536 --contiguity 0 \
		--rounds 9 --arena $((64 << 20)) --duration 1s -o table >$report 2>/tmp/progress || fail "bench: $(cat /tmp/progress)"
	sed 's/^/> /' $report
	! grep -q 'not measured' $report || fail "something was not measured"
	[ "$(grep -c '^ *rdma  *[0-9]' $report)" -eq 2 ] || fail "want two rows of rdma"
}

for part; do
	"part_$part"
done
