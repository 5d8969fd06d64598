#!/usr/bin/env bash
# bundle.sh: makes .gpu, all that scripts/gpu-check.sh needs on a machine with a
# GPU that has no Go and no network: the tests of cuda and of cudaipc as programs,
# with their testdata, the binary, the tests of gorgonia.org/cu, and the scripts
# that use PyTorch.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/local/go/bin
root=$PWD
eval "$(scripts/cuda-env.sh)"
out=.gpu
rm -rf "$out"
for package in cuda transfer/cudaipc; do
	name=${package##*/}
	mkdir -p "$out/$name"
	go test -c -trimpath -ldflags='-s -w' -tags cuda -o "$out/$name/$name.test" "./$package"
	[ ! -d "$package/testdata" ] || cp -r "$package/testdata" "$out/$name"
done
go build -trimpath -ldflags='-s -w' -tags cuda -o "$out/kvferry" ./cmd/kvferry
cp scripts/gpu/torch_*.py "$out"

# Those of gorgonia.org/cu call cuInit when they start: they are linked with a
# libcuda.so.1, here the emulated one.
tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvb.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
library=$(go test -count=1 -v -run '^TestBuild$' ./cuda/cudatest | sed -n 's/.*built: //p')
ln -s "$library" "$tmp/libcuda.so"
if ! CGO_CFLAGS="-I$root/cuda/internal/driver/include -O2 -g" CGO_LDFLAGS="-L$tmp -Wl,--unresolved-symbols=ignore-in-shared-libs" \
	go test -c -trimpath -ldflags='-s -w' -o "$out/cu.test" gorgonia.org/cu 2>"$tmp/cu.txt"; then
	echo "bundle: gorgonia's own tests are left out: $(head -3 "$tmp/cu.txt" | paste -sd' ')" >&2
fi
du -sh "$out"
