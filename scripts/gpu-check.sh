#!/usr/bin/env bash
# gpu-check.sh: looks at a machine with a GPU, with what make gpu-bundle has put
# into .gpu; it needs no Go and no network, and takes at most 8 minutes. What each
# step said goes to a file of $OUT (default gpu-out); the tables come last. Status 0
# if no step failed.
#
# With KVFERRY_CUDA_LIBRARY=PATH of a libcuda.so.1 it is tried on the emulated driver.
set -u
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-$root/gpu-out}
mkdir -p "$out"
[ -x .gpu/cuda/cuda.test ] || {
	echo "gpu-check: there is no .gpu: run make gpu-bundle where there is Go" >&2
	exit 2
}
export KVFERRY_CUDA_GPU=1
if [ -n "${KVFERRY_CUDA_LIBRARY:-}" ]; then
	export LD_LIBRARY_PATH=$(dirname "$KVFERRY_CUDA_LIBRARY")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
failed=0

# step NAME SECONDS DIRECTORY COMMAND...: a step that may take so long.
step() {
	local name=$1 limit=$2 dir=$3 begin=$SECONDS status=0
	shift 3
	(cd "$dir" && timeout -k 5 "$limit" "$@") >"$out/$name.txt" 2>&1 || status=$?
	[ "$status" -eq 0 ] || failed=1
	printf '%-8s status %-3s %3d s, at %3d s  %s\n' "$name" "$status" $((SECONDS - begin)) "$SECONDS" "$(grep -E '^(ok|PASS|FAIL|---|panic)' "$out/$name.txt" | grep -v -- '--- \(PASS\|SKIP\)' | tail -1)"
}

environment() {
	uname -a
	nvidia-smi || echo "no nvidia-smi"
	nvidia-smi topo -m || true
	cat /proc/driver/nvidia/version
	ldconfig -p | grep libcuda
	ls -l /usr/local/nvidia/lib*/libcuda*
	ls /sys/module | grep -i nvidia
	lscpu | grep -iE 'model name|^CPU\(s\)|numa'
	free -g
	python3 -c 'import torch; print("torch", torch.__version__, torch.version.cuda)'
	ulimit -l
	"$root/.gpu/kvferry" version
	"$root/.gpu/kvferry" doctor
	true
}
export root
export -f environment

step env 20 "$root" bash -c environment
step probe 70 "$root/.gpu/cuda" ./cuda.test -test.run '^TestGPUProbe$' -test.v -test.timeout=65s
step sweep 90 "$root/.gpu/cuda" ./cuda.test -test.run '^TestGPUSweep$' -test.v -test.timeout=85s
KVFERRY_CUDA_MATMUL=$root/.gpu/torch_matmul.py step beside 40 "$root/.gpu/cuda" ./cuda.test -test.run '^TestGPUBeside$' -test.v -test.timeout=35s
step cuda 75 "$root/.gpu/cuda" ./cuda.test -test.skip '^TestGPU' -test.v -test.timeout=70s
step cudaipc 85 "$root/.gpu/cudaipc" ./cudaipc.test -test.v -test.timeout=80s
step torch 75 "$root" bash -c 'python3 .gpu/torch_ipc.py .gpu/cuda/cuda.test && PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python3 .gpu/torch_ipc.py .gpu/cuda/cuda.test'
# What others' tests say is told, and fails nothing.
judged=$failed
[ ! -x .gpu/cu.test ] || step cu 25 "$root" .gpu/cu.test -test.v -test.timeout=20s
failed=$judged

echo
echo "tests: $(cat "$out"/{cuda,cudaipc}.txt | grep -c -- '^ *--- PASS') passed, $(cat "$out"/{cuda,cudaipc}.txt | grep -c -- '^ *--- SKIP') skipped, $(cat "$out"/{cuda,cudaipc}.txt | grep -c -- '^ *--- FAIL') failed"
echo
grep -h '^|' "$out/probe.txt" "$out/beside.txt" "$out/torch.txt"
echo
grep -h '^|' "$out/sweep.txt"
exit $failed
