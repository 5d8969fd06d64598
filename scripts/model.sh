#!/usr/bin/env bash
# model.sh [NAME...]
#
# Checks the model of read safety (docs/model) with spin: every configuration
# must hold in all of its states, and every mutant, a model with one rule
# broken, must be refuted. A line a run. Given names, it runs those alone and
# tells the counterexamples too.
#
# Exit: 1 if anything is not as expected, a search that did not end included.
# It takes two cores, 3 GiB of memory, and a minute or two.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$PWD/docs/model/seal.pml

for tool in spin gcc; do
	command -v "$tool" >/dev/null || {
		echo "model: $tool is missing; run: scripts/deps.sh check (Debian: apt-get install -y $tool)" >&2
		exit 1
	}
done

set -m # every run is a process group, to be ended with all of it
tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvmodel.XXXXXX")
finish() {
	trap '' INT TERM
	for run in $(jobs -p); do kill -TERM -- "-$run" 2>/dev/null || true; done
	wait
	rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

only=" $* "
known=" "
# chosen NAME: is it to be run?
chosen() {
	known+="$1 "
	[ "$only" = "  " ] || [[ $only == *" $1 "* ]]
}
most=$(nproc)
[ "$most" -le 2 ] || most=2
# start FUNCTION ARG...: beside at most one other run.
start() {
	while [ "$(jobs -pr | wc -l)" -ge "$most" ]; do wait -n || true; done
	"$@" &
}

# search SECONDS FLAGS CC-FLAGS PAN-FLAGS, in a directory of its own.
search() {
	# shellcheck disable=SC2086 # flags are words
	spin $2 -a "$model" >spin.log 2>&1 &&
		gcc -w -DVECTORSZ=256 -DMEMLIM=2200 $3 -o pan pan.c &&
		timeout --foreground "$1" ./pan -w24 $4 >pan.log 2>&1
}
states() { sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log | head -n 1; }
# whole: the search ended by itself.
whole() {
	grep -q '^State-vector' pan.log && ! grep -q 'Search not completed\|max search depth too small\|MEMLIM\|out of memory' pan.log
}
clean() { whole && grep -q 'errors: 0$' pan.log; }
# steps FLAGS: the counterexample, a line a transition.
steps() {
	# shellcheck disable=SC2086
	spin $1 -t -k ./*.trail "$model" 2>/dev/null | sed -n 's/^ *@ /    /p'
}
# verdict NAME SECONDS WORDS
verdict() { printf '%-24s %10s states %4s s  %s\n' "$1" "$(states)" "$2" "$3"; }
# wrong NAME SECONDS WORDS
wrong() {
	verdict "$1" "$2" "WRONG: $3"
	: >"$tmp/wrong"
	[ ! -s spin.log ] || tail -n 5 spin.log
	[ ! -f pan.log ] || grep -m 3 '^pan:\|^error\|^Warning' pan.log || true
}

# holds NAME FLAGS: no assertion fails in any state.
holds() {
	local began=$SECONDS
	mkdir "$tmp/$1" && cd "$tmp/$1"
	if search 600 "$2" "-O2 -DSAFETY" -m100000 && clean; then
		verdict "$1" $((SECONDS - began)) holds
	else
		wrong "$1" $((SECONDS - began)) "it must hold"
		[ ! -f seal.pml.trail ] || steps "$2"
	fi
	rm -rf "$tmp/${1:?}"
}
# refuted NAME FLAGS: an assertion fails; the way there is a shortest one.
refuted() {
	local began=$SECONDS mutant flags n
	mutant=${1^^}
	flags="-DMUTANT -DM_${mutant//-/_} $2"
	mkdir "$tmp/$1" && cd "$tmp/$1"
	if search 600 "$flags" "-O1 -DSAFETY -DBFS" -m100000 && grep -q '^pan:1: assertion violated' pan.log &&
		n=$(steps "$flags" | wc -l) && [ "$n" -gt 0 ]; then
		verdict "$1" $((SECONDS - began)) "refuted in $n steps"
		[ "$only" = "  " ] || { steps "$flags" && sed -n 's/^pan:1: \(.*\) (at depth.*/    -> \1/p' pan.log; }
	else
		wrong "$1" $((SECONDS - began)) "it must be refuted"
	fi
	rm -rf "$tmp/${1:?}"
}
# comes NAME CLAIM FLAGS: the claim holds, if whoever can go on does so at some time.
comes() {
	local began=$SECONDS
	mkdir "$tmp/$1" && cd "$tmp/$1"
	if search 600 "-DLIVENESS $3" "-O2 -DNFAIR=4" "-a -f -m300000 -N $2" && clean; then
		verdict "$1" $((SECONDS - began)) holds
	else
		wrong "$1" $((SECONDS - began)) "it must hold"
	fi
	rm -rf "$tmp/${1:?}"
}
# never NAME CLAIM FLAGS: a mutant for which it does not.
never() {
	local began=$SECONDS mutant=${1^^}
	mkdir "$tmp/$1" && cd "$tmp/$1"
	if search 600 "-DLIVENESS -DMUTANT -DM_${mutant//-/_} $3" "-O2 -DNFAIR=4" "-a -f -m300000 -N $2" && grep -q '^pan:1: acceptance cycle' pan.log; then
		verdict "$1" $((SECONDS - began)) "refuted: it can go on for ever"
	else
		wrong "$1" $((SECONDS - began)) "it must be refuted"
	fi
	rm -rf "$tmp/${1:?}"
}
check() { ! chosen "$2" || start "$@"; }

# The longest first. What the letters mean is said in the model.
check holds all "-DFORK -DRESET -DOFFLOAD -DTWO -DNS=2 -DNP=3 -DNB=1 -DNT=2 -DNG=2"
check holds fork-pages "-DFORK -DNS=2 -DNP=4 -DNB=2 -DNT=2 -DNG=1"
check holds offload-again "-DOFFLOAD -DLEASE -DREVOKE -DTWO -DNS=1 -DNP=2 -DNB=1 -DNT=2 -DNG=3"
check holds crash "-DCRASH -DLOSS -DNS=2 -DNP=2 -DNB=2 -DNT=3 -DNG=2 -DTRIES=2"
check holds fork-reset "-DFORK -DRESET -DTWO -DNS=2 -DNP=3 -DNB=1 -DNT=3 -DNG=2"
check holds reset "-DRESET -DTWO -DNS=1 -DNP=3 -DNB=2 -DNT=3 -DNG=3"
check holds leases "-DLEASE -DREVOKE -DLOSS -DNS=2 -DNP=2 -DNB=2 -DNT=3 -DNG=2 -DTRIES=2"
check holds growth "-DNS=1 -DNP=3 -DNB=2 -DNT=3 -DNG=3"
check holds offload "-DOFFLOAD -DLEASE -DREVOKE -DNS=1 -DNP=3 -DNB=2 -DNT=2 -DNG=2"
check holds fork "-DFORK -DTWO -DNS=2 -DNP=4 -DNB=1 -DNT=2 -DNG=2"
check holds ranks "-DRANKS=2 -DRESET -DTWO -DNS=1 -DNP=2 -DNB=2 -DNT=3 -DNG=2"
check holds ranks-offload "-DRANKS=2 -DRESET -DOFFLOAD -DTWO -DNS=1 -DNP=3 -DNB=1 -DNT=3 -DNG=2"
check holds readers "-DLEASE -DREVOKE -DNR=2 -DNS=1 -DNP=2 -DNB=1 -DNT=2 -DNG=2"

one="-DNS=1 -DNP=2 -DNB=1 -DNT=2"
check comes retrieval-ends retrieval_ends "-DLOSS -DRANKS=2 -DNS=1 -DNP=2 -DNB=2 -DNT=1 -DNG=1 -DTRIES=2"
check comes limbo-empties limbo_empties "-DLEASE -DREVOKE -DNS=1 -DNP=2 -DNB=1 -DNT=2 -DNG=2"
check comes limbo-empties-fork limbo_empties "-DFORK -DTWO -DNS=2 -DNP=3 -DNB=1 -DNT=2 -DNG=2"
check comes limbo-empties-offload limbo_empties "-DOFFLOAD -DRESET -DNS=1 -DNP=2 -DNB=1 -DNT=2 -DNG=2"
check never drain-without-destroy retrieval_ends "-DLOSS $one -DNG=1"
check never lease-for-ever limbo_empties "-DLEASE -DREVOKE $one -DNG=1"

check refuted word-after-free "$one -DNG=1"
check refuted word-beside-data "$one -DNG=1"
check refuted sequence-alone "-DCRASH $one -DNG=2"
check refuted old-table "-DCRASH $one -DNG=1"
check refuted table-late "-DCRASH $one -DNG=1"
check refuted no-drain "$one -DNG=1"
check refuted ack-without-identity "-DLEASE $one -DNG=2 -DTRIES=2"
check refuted length-before-bytes "$one -DNG=1"
check refuted offload-keeps-word "-DOFFLOAD $one -DNG=1"
check refuted offload-frees-early "-DOFFLOAD $one -DNG=1"
check refuted reload-named-early "-DOFFLOAD $one -DNG=2"
check refuted reset-in-place "-DRESET $one -DNG=1"
check refuted reset-frees-early "-DRESET $one -DNG=1"
check refuted fork-in-place "-DFORK -DNS=2 -DNP=3 -DNB=1 -DNT=2 -DNG=1"
check refuted fork-keeps-word "-DFORK -DNS=2 -DNP=3 -DNB=1 -DNT=3 -DNG=1"
check refuted fork-frees-early "-DFORK -DNS=2 -DNP=3 -DNB=1 -DNT=3 -DNG=1"
check refuted first-of-two "-DTWO $one -DNG=2"
check refuted one-rank "-DRANKS=2 $one -DNG=1"
check refuted lease-for-word "-DLEASE -DOFFLOAD $one -DNG=1"
wait

for name in "$@"; do
	[[ $known == *" $name "* ]] || {
		echo "model: there is no run $name; there are:$known" >&2
		exit 1
	}
done
[ ! -e "$tmp/wrong" ] || {
	echo "model: not as expected, see WRONG above" >&2
	exit 1
}
