#!/usr/bin/env bash
# cuda-env.sh: prints what a build with the tag cuda needs in its environment,
# for eval "$(scripts/cuda-env.sh)": CGO_CFLAGS with our cuda.h, CGO_LDFLAGS with
# the libcuda.a that finds the driver at run time. What they hold already stays.
#
# Both are made here, into a folder of bin/cuda that is named for their source:
# Go's build cache knows a library by its path alone. Several may run at once.
set -euo pipefail
cd "$(dirname "$0")/.."

driver=cuda/internal/driver
cc=${CC:-cc}
machine=$($cc -dumpmachine) || {
	echo "cuda-env: no C compiler ($cc); without one leave the tag cuda out" >&2
	exit 1
}
name=$(cat "$driver"/late/* "$driver"/include/* scripts/cuda-env.sh | cat - <(echo "$machine") | sha256sum | cut -c1-12)
made=$PWD/bin/cuda/$name
if [ ! -d "$made" ]; then
	mkdir -p bin/cuda
	aside=$(mktemp -d bin/cuda/.making.XXXXXX)
	trap 'rm -rf "$aside"' EXIT
	cp -r "$driver/include" "$aside/include"
	for f in late.c late.S; do
		$cc -O2 -fPIC -Wall -Wextra -Werror -I"$driver/late" -c "$driver/late/$f" -o "$aside/$f.o"
	done
	${AR:-ar} rcs "$aside/libcuda.a" "$aside/late.c.o" "$aside/late.S.o"
	rm "$aside"/*.o
	chmod 755 "$aside"
	# Who comes second finds a folder there, and it is the same.
	mv -T "$aside" "$made" 2>/dev/null || [ -d "$made" ]
fi

# others prints words, but for those that an earlier run has put in.
others() {
	local word
	for word in "$@"; do
		case $word in
		-[IL]"$PWD"/bin/cuda/*) ;;
		*) printf ' %s' "$word" ;;
		esac
	done
}
# Go's own default goes as soon as one of them is set.
read -ra cflags <<<"${CGO_CFLAGS--O2 -g}"
read -ra ldflags <<<"${CGO_LDFLAGS--O2 -g}"
printf 'export CGO_CFLAGS=%q\n' "-I$made/include$(others "${cflags[@]}")"
printf 'export CGO_LDFLAGS=%q\n' "-L$made$(others "${ldflags[@]}")"
