#!/usr/bin/env bash
# vm.sh BINARY [ARGS...]
#
# Runs one command inside a throw-away QEMU guest that has two Soft-RoCE
# devices (rxe0 and rxe1) at the two ends of a veth pair, and exits with that
# command's status. Nothing outside the Debian archive is needed:
#
#   apt-get install --no-install-recommends linux-image-amd64 qemu-system-x86 \
#       busybox-static cpio xz-utils iproute2 libibverbs1 ibverbs-providers \
#       ibverbs-utils kmod
#
# BINARY may be a path or a name on PATH, or a script that begins with
# #!/bin/sh (the guest's shell and tools are busybox: the real ip and tc are
# /sbin/ip and /sbin/tc); it and every shared
# library that ldd finds are copied in. libibverbs.so.1 and the rxe provider are
# always there, so binaries that dlopen them work too; so are ib_read_bw,
# ibv_devinfo and tc, if this machine has them.
#
# Environment:
#   KVFERRY_VM_TIMEOUT  seconds before the guest is killed, exit 124   (300)
#   KVFERRY_VM_MEM      guest memory in MiB                            (2048)
#   KVFERRY_VM_CPUS     guest CPUs                                     (2)
#   KVFERRY_VM_ACCEL    auto | kvm | tcg                               (auto)
#   KVFERRY_VM_MTU      MTU of the veth pair                           (9000)
#   KVFERRY_VM_HUGE     2 MiB huge pages to reserve                    (0)
#   KVFERRY_VM_NETEM    e.g. "delay 100us" or "loss 0.1%" on both ends ()
#   KVFERRY_VM_KVER     kernel release                                 (newest with rdma_rxe)
#   KVFERRY_VM_FILES    "SRC[:DST] ..." more files, or directories with all
#                       that is in them; DST not in /tmp               ()
#   KVFERRY_VM_PASS     names of variables to hand to the command      (GODEBUG GOMAXPROCS GOTRACEBACK)
#   KVFERRY_VM_OUT      host directory, mounted read-write at /out (9p) ()
#   KVFERRY_VM_SETUP    shell file sourced in the guest before the command ()
#   KVFERRY_VM_VERBOSE  1: the kernel console goes to stderr afterwards ()
#   KVFERRY_VM_CACHE    where the base image is kept                   (~/.cache/kvferry-vm)
#   KVFERRY_VM_TIMES    1: boot and run times go to stderr             ()
#
# Exit: the command's own status; 124 out of time; 125 the harness failed.
set -euo pipefail
trap 'exit 143' TERM; trap 'exit 130' INT HUP

die() { echo "vm: $*" >&2; exit 125; }
trap 'echo "vm: line $LINENO: $BASH_COMMAND failed" >&2; exit 125' ERR
[ $# -ge 1 ] || { sed -n '2,37p' "$0" >&2; exit 125; }

TIMEOUT=${KVFERRY_VM_TIMEOUT:-300} MEM=${KVFERRY_VM_MEM:-2048} CPUS=${KVFERRY_VM_CPUS:-2}
ACCEL=${KVFERRY_VM_ACCEL:-auto} MTU=${KVFERRY_VM_MTU:-9000} HUGE=${KVFERRY_VM_HUGE:-0}
PASS=${KVFERRY_VM_PASS:-GODEBUG GOMAXPROCS GOTRACEBACK}
CACHE=${KVFERRY_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry-vm}
export PATH=$PATH:/sbin:/usr/sbin

for t in qemu-system-x86_64 cpio busybox modprobe rdma ip ldd; do
  command -v $t >/dev/null || die "missing $t (see the apt-get line at the top of $0)"
done
KVER=${KVFERRY_VM_KVER:-}
[ -n "$KVER" ] || for v in $(ls /boot/vmlinuz-* 2>/dev/null | sed 's|.*/vmlinuz-||' | sort -rV); do
  if [ -r "/boot/vmlinuz-$v" ] && modprobe -S "$v" -n rdma_rxe 2>/dev/null; then KVER=$v; break; fi
done
[ -n "$KVER" ] || die "no readable kernel with the module rdma_rxe in /boot (on Ubuntu: chmod +r /boot/vmlinuz-*, linux-modules-extra)"

BIN=$(type -P -- "$1") || die "no such command: $1"; shift
BIN=$(readlink -f "$BIN")

# ---- staging helpers ---------------------------------------------------
# stage ROOT FILE [DST]: the file itself, then what its loader would map.
# The guest is usr-merged; a real /lib directory in the overlay would replace
# the base's link, so every path is first taken to where it really lies.
canon() { case $1 in /lib/*|/lib64/*|/bin/*|/sbin/*) echo "/usr$1";; *) echo "$1";; esac; }
stage_libs() { # ROOT FILE
  local l d; # a script or a static binary has none
  { ldd "$2" 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*' || true; } | sort -u | while read -r l; do
    d=$(canon "$l"); [ -e "$1$d" ] || { mkdir -p "$1$(dirname "$d")"; cp -L "$l" "$1$d"; }
  done
}
stage() { # ROOT FILE [DST]
  local dst f; dst=$(canon "${3:-$2}")
  if [ -d "$2" ]; then
    mkdir -p "$1$dst"; cp -rL "$2/." "$1$dst"
    find -L "$2" -type f -perm -u+x | while read -r f; do stage_libs "$1" "$f"; done
    return
  fi
  mkdir -p "$1$(dirname "$dst")"; cp -L "$2" "$1$dst"; stage_libs "$1" "$2"
}
pack() { (cd "$1" && find . -mindepth 1 | LC_ALL=C sort | cpio -o -H newc -R 0:0 --quiet); }

# ---- base image: kernel modules, busybox, ip, rdma, libibverbs, rxe ---------
LIBDIR=$(dirname "$(readlink -f "$(ldconfig -p | awk '/libibverbs\.so\.1 / && !n++ {print $NF}')")")
[ -d "$LIBDIR" ] || die "libibverbs.so.1 not found"
MODS="crc32_generic rdma_rxe ib_uverbs rdma_ucm veth"
TOOLS=$(for t in ip rdma tc ibv_devinfo ib_read_bw; do command -v $t || true; done)
KEY=$({ cat "$0"; echo "$KVER $LIBDIR"; stat -Lc '%n %s %Y' "/boot/vmlinuz-$KVER" "$LIBDIR/libibverbs.so.1" $TOOLS; } | sha256sum | cut -c1-16)
BASE=$CACHE/base-$KEY.cpio KERN=$CACHE/vmlinux-$KVER-$KEY
if [ ! -s "$BASE" ]; then
  mkdir -p "$CACHE"; W=$(mktemp -d); trap 'rm -rf "$W"' EXIT
  find "$CACHE" -maxdepth 1 -type f -mtime +30 -delete # of kernels and scripts that are gone
  R=$W/root; mkdir -p "$R"/{etc/libibverbs.d,proc,sys,dev,tmp,run,out,root,usr/bin,usr/sbin,usr/lib/modules,usr/lib64}
  for d in bin sbin lib lib64; do ln -s usr/$d "$R/$d"; done
  cp "$(command -v busybox)" "$R/bin/busybox"
  # All of busybox but what the real ones do.
  for a in $(busybox --list); do case $a in busybox|ip|tc) ;; *) ln -sf busybox "$R/bin/$a";; esac; done
  for t in $TOOLS; do stage "$R" "$t" "/sbin/$(basename "$t")"; done
  stage "$R" "$LIBDIR/libibverbs.so.1"
  for p in "$LIBDIR"/libibverbs/librxe-rdmav*.so; do stage "$R" "$p"; done
  cp /etc/libibverbs.d/rxe.driver "$R/etc/libibverbs.d/"
  # libgcc_s is dlopened by glibc on pthread_exit/pthread_cancel
  for l in libgcc_s.so.1; do p=$(ldconfig -p | awk -v l=$l '$1==l && !n++ {print $NF}'); [ -n "$p" ] && stage "$R" "$p"; done
  echo '127.0.0.1 localhost' >"$R/etc/hosts"; echo 'root:x:0:0:root:/root:/bin/sh' >"$R/etc/passwd"; echo 'hosts: files' >"$R/etc/nsswitch.conf"
  mods() { # LIST MODULE...: copies them with what they need, in loading order
    local l=$1; shift; for m in "$@"; do modprobe -S "$KVER" --show-depends "$m" 2>/dev/null || true; done |
      awk '$1=="insmod" && !s[$2]++ {print $2}' | while read -r f; do
        b=$(basename "$f"); case $b in
          *.xz) xz -dc "$f" >"$R/lib/modules/${b%.xz}"; b=${b%.xz};;
          *.zst) zstd -qdc "$f" >"$R/lib/modules/${b%.zst}"; b=${b%.zst};;
          *) cp "$f" "$R/lib/modules/$b";;
        esac; echo "$b" >>"$R/lib/modules/$l"
      done
  }
  mods always $MODS; mods kvm crc32_pclmul; # emulated, pclmulqdq is slower than tables
  mods netem sch_netem; mods share virtio_pci 9pnet_virtio 9p
  cat >"$R/init" <<'INIT'
#!/bin/sh
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TMPDIR=/tmp
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
exec </dev/null >/dev/ttyS0 2>&1
ip() { /sbin/ip "$@"; }; tc() { /sbin/tc "$@"; } # busybox sh would run its own
mkdir -p /dev/shm /dev/hugepages /dev/pts; mount -t tmpfs tmp /tmp; mount -t tmpfs shm /dev/shm; mount -t devpts pts /dev/pts
stty -F /dev/ttyS1 raw -echo; stty -F /dev/ttyS2 raw -echo
finish() { sync; echo "rc=$1" >/dev/ttyS2; poweroff -f; sleep 30; }
fatal() { echo "SETUP FAILED: $*"; echo "vm guest: $*" >/dev/ttyS1; finish 125; }
. /run/vm.env
load() { while read m; do insmod /lib/modules/$m || echo "insmod $m failed"; done </lib/modules/$1; }
[ "$VM_ACCEL" = kvm ] && load kvm; load always; [ -n "$VM_NETEM" ] && load netem; [ -n "$VM_OUT" ] && load share
ulimit -l unlimited; ulimit -n 65536; ulimit -c 0
echo 0 >/proc/sys/net/ipv6/conf/all/accept_dad; echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
# One link, both ends in this namespace (6.1's rxe knows only the initial
# one). rxe looks routes up with the device fixed, so packets do cross it, if
# the receiving side does not drop a source address that is also its own.
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
echo 1 >/proc/sys/net/ipv4/conf/default/accept_local; echo 0 >/proc/sys/net/ipv4/conf/default/rp_filter
ip -batch - <<B || fatal veth
link set lo up
link add v0 address 02:77:00:00:00:01 mtu $VM_MTU type veth peer name v1 address 02:77:00:00:00:02 mtu $VM_MTU
addr add 10.77.0.1/24 dev v0
addr add 10.77.0.2/24 dev v1
link set v0 up
link set v1 up
neigh replace 10.77.0.2 lladdr 02:77:00:00:00:02 dev v0 nud permanent
neigh replace 10.77.0.1 lladdr 02:77:00:00:00:01 dev v1 nud permanent
B
# Two CPUs would put packets of one flow into two backlogs, and RC takes a
# change of order for loss: a third of the reads were sent again.
for i in 0 1; do echo 1 >/sys/class/net/v$i/queues/rx-0/rps_cpus; done
[ -n "$VM_NETEM" ] && for i in 0 1; do tc qdisc add dev v$i root netem $VM_NETEM limit 100000 || fatal netem; done
rdma link add rxe0 type rxe netdev v0 && rdma link add rxe1 type rxe netdev v1 || fatal "rdma link add"
[ "$VM_HUGE" -gt 0 ] && { echo $VM_HUGE >/proc/sys/vm/nr_hugepages; mount -t hugetlbfs -o pagesize=2M none /dev/hugepages; }
[ -n "$VM_OUT" ] && { mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 out /out || fatal "9p"; }
[ -f /run/setup.sh ] && . /run/setup.sh
echo "uptime-at-start=$(cut -d' ' -f1 /proc/uptime)" >/dev/ttyS2
cd /root; [ -n "$VM_OUT" ] && cd /out
setsid sh /run/cmd.sh </dev/null >/dev/ttyS1 2>&1
rc=$?
echo "uptime-at-end=$(cut -d' ' -f1 /proc/uptime)" >/dev/ttyS2
finish $rc
INIT
  chmod +x "$R/init"; pack "$R" >"$BASE.$$"
  # PVH entry skips the decompressor, which costs over a second under TCG.
  rm -f "$KERN"; off=$(LC_ALL=C grep -abo $'\xfd7zXZ\x00' "/boot/vmlinuz-$KVER" 2>/dev/null | head -1 | cut -d: -f1 || true)
  if [ -n "$off" ] && command -v xz >/dev/null; then
    { tail -c +$((off+1)) "/boot/vmlinuz-$KVER" | xz -dc --single-stream >"$KERN.$$"; } 2>/dev/null || true
    [ "$(head -c 4 "$KERN.$$" | tail -c 3)" = ELF ] && mv "$KERN.$$" "$KERN" || rm -f "$KERN.$$"
  fi
  mv "$BASE.$$" "$BASE"; rm -rf "$W"; trap - EXIT
fi
[ -s "$KERN" ] || KERN=/boot/vmlinuz-$KVER

W=$(mktemp -d); QPID=; trap '[ -n "$QPID" ] && kill -9 $QPID 2>/dev/null; rm -rf "$W"' EXIT

# ---- accelerator ------------------------------------------------------------
qemu() { # ACCEL INITRD OUTFD STATUSFILE CONSOLEFILE
  # Emulated, rep movs copies byte by byte, or word by word: plain moves carry
  # twice as many bytes over the link.
  local cpu=max,-erms acc=tcg,thread=multi,tb-size=256 plain="clearcpuid=rep_good"
  [ "$1" = kvm ] && { acc=kvm; cpu=host; plain=; }
  local a=(-machine pc -accel "$acc" -cpu "$cpu" -smp "$CPUS" -m "$MEM" -nodefaults -no-user-config -display none -no-reboot)
  [ -n "${KVFERRY_VM_OUT:-}" ] && a+=(-virtfs "local,path=$KVFERRY_VM_OUT,mount_tag=out,security_model=none,multidevs=remap")
  # Not even SIGKILL to this script may leave a guest behind.
  local die=(); setpriv --pdeathsig KILL true 2>/dev/null && die=(setpriv --pdeathsig KILL)
  exec "${die[@]}" qemu-system-x86_64 "${a[@]}" -kernel "$KERN" -initrd "$2" \
    -append "console=ttyS0 quiet panic=-1 rdinit=/init nokaslr oops=panic mitigations=off tsc=reliable random.trust_cpu=on 8250.nr_uarts=4 cryptomgr.notests $plain ${KVFERRY_VM_APPEND:-}" \
    -serial "file:$5" -chardev stdio,id=o,signal=off -serial chardev:o -serial "file:$4"
}
kvm_works() { # a real boot, once per host boot and image; the answer is kept
  [ -r /dev/kvm ] && [ -w /dev/kvm ] || return 1
  # Without vmx or svm /dev/kvm is some software scheme (kvm_pvm): it takes a
  # stock kernel, but emulates every instruction of it.
  grep -qE '^flags.* (vmx|svm)( |$)' /proc/cpuinfo || return 1
  local v=$CACHE/kvm-$KEY-$(cat /proc/sys/kernel/random/boot_id)
  if [ ! -f "$v" ]; then
    local P=$W/probe; mkdir -p "$P/ov/run"; echo 'exec /bin/true' >"$P/ov/run/cmd.sh"; echo 'VM_ACCEL=kvm VM_MTU=1500 VM_HUGE=0 VM_OUT= VM_NETEM=' >"$P/ov/run/vm.env"
    { cat "$BASE"; pack "$P/ov"; } >"$P/initrd"; : >"$P/st"
    ( KVFERRY_VM_OUT=; qemu kvm "$P/initrd" - "$P/st" "$P/con" ) </dev/null >/dev/null 2>&1 & local p=$!
    for _ in $(seq 100); do kill -0 $p 2>/dev/null || break; sleep 0.1; done; kill -9 $p 2>/dev/null; wait $p 2>/dev/null || true
    if grep -q '^rc=0' "$P/st"; then echo yes >"$v"; else echo no >"$v"; fi
  fi
  grep -q yes "$v"
}
case $ACCEL in auto) if kvm_works; then ACCEL=kvm; else ACCEL=tcg; fi;; kvm|tcg) ;; *) die "KVFERRY_VM_ACCEL=$ACCEL";; esac

# ---- overlay: the command -------------------------------------------------
O=$W/ov; mkdir -p "$O/run" "$O/cmd"
q() { local s=; for a in "$@"; do s="$s '$(printf %s "$a" | sed "s/'/'\\\\''/g")'"; done; printf '%s' "${s# }"; }
NAME=$(basename "$BIN"); stage "$O" "$BIN" "/cmd/$NAME"
for f in ${KVFERRY_VM_FILES:-}; do stage "$O" "${f%%:*}" "${f#*:}"; done
# go test -exec runs this in the package's directory, and so does the guest
[ -d testdata ] && { mkdir -p "$O/root"; cp -rL testdata "$O/root/"; }
[ -n "${KVFERRY_VM_SETUP:-}" ] && cp "$KVFERRY_VM_SETUP" "$O/run/setup.sh"
{ for v in $PASS; do [ -n "${!v+x}" ] && printf 'export %s=%s\n' "$v" "$(q "${!v}")"; done
  printf 'exec %s\n' "$(q "/cmd/$NAME" "$@")"; } >"$O/run/cmd.sh"
{ printf 'VM_ACCEL=%s VM_MTU=%s VM_HUGE=%s VM_OUT=%s\n' "$ACCEL" "$MTU" "$HUGE" "$(q "${KVFERRY_VM_OUT:-}")"; printf 'VM_NETEM=%s\n' "$(q "${KVFERRY_VM_NETEM:-}")"; } >"$O/run/vm.env"
{ cat "$BASE"; pack "$O"; } >"$W/initrd"

# ---- run ---------------------------------------------------------------------
: >"$W/status"; T0=$(date +%s.%N)
qemu "$ACCEL" "$W/initrd" - "$W/status" "$W/console" </dev/null 2>"$W/qemu.err" & QPID=$!
LIMIT=$((SECONDS+TIMEOUT)); OUT=
while kill -0 "$QPID" 2>/dev/null; do
  [ $SECONDS -lt $LIMIT ] || { OUT=1; kill -9 "$QPID" 2>/dev/null; break; }
  sleep 0.1
done
wait "$QPID" 2>/dev/null || true; QPID=; T1=$(date +%s.%N)
RC=$(sed -n 's/^rc=//p' "$W/status" | tr -d '\r' | tail -1)
[ -n "${KVFERRY_VM_VERBOSE:-}" ] && { sed 's/^/console: /' "$W/console" >&2 || true; }
if [ -n "${KVFERRY_VM_TIMES:-}" ]; then
  awk -v a="$T0" -v b="$T1" -v acc="$ACCEL" -F= '/uptime-at-start/{s=$2} /uptime-at-end/{e=$2} END{printf "vm: accel=%s guest-uptime-at-start=%.1fs command=%.1fs total-wall=%.1fs\n",acc,s,e-s,b-a}' "$W/status" >&2
fi
if [ -n "$OUT" ]; then echo "vm: killed after ${TIMEOUT}s" >&2; tail -5 "$W/console" >&2 || true; exit 124; fi
if [ -z "$RC" ]; then echo "vm: guest ended without a status" >&2; cat "$W/qemu.err" >&2; tail -20 "$W/console" >&2 || true; exit 125; fi
exit "$RC"
