"""torch_ipc.py CUDA.TEST: memory that PyTorch has allocated, adopted by a process
of ours. The tensor's handle is asked of the driver itself, as an engine would:
PyTorch's own has more in front of it. Where there is no PyTorch, the memory comes
from cuMemAlloc."""

import ctypes
import os
import subprocess
import sys

MIB = 1 << 20
cuda = ctypes.CDLL(os.environ.get("KVFERRY_CUDA_LIBRARY", "libcuda.so.1"))


def call(name: str, *args: object) -> int:
    return int(getattr(cuda, name)(*args))


def must(name: str, *args: object) -> None:
    result = call(name, *args)
    if result:
        raise SystemExit(f"{name}: CUDA error {result}")


def tensor() -> tuple[int, int, object, str]:
    """Address and bytes of memory that is not at the start of its allocation, what
    keeps it alive, and where it is from."""
    try:
        import torch  # type: ignore

        before = torch.ones(4 * MIB // 2, dtype=torch.bfloat16, device="cuda")
        t = torch.zeros(8 * MIB // 2, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        return t.data_ptr(), 8 * MIB, (before, t), f"PyTorch {torch.__version__}"
    except (ImportError, RuntimeError, AssertionError) as e:
        context = ctypes.c_void_p()
        must("cuInit", 0)
        must("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        must("cuCtxSetCurrent", context)
        p = ctypes.c_uint64()
        must("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(12 * MIB))
        must("cuMemsetD8_v2", p, ctypes.c_ubyte(0), ctypes.c_size_t(12 * MIB))
        return p.value + 4 * MIB, 8 * MIB, context, f"cuMemAlloc ({e})"


def main(program: str) -> None:
    address, size, alive, source = tensor()
    kind = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default segments")
    print(f"memory of {source}, {kind}")
    base, whole = ctypes.c_uint64(), ctypes.c_size_t()
    must("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(whole), ctypes.c_uint64(address))
    legacy, types = ctypes.c_ubyte(), ctypes.c_uint64()
    call("cuPointerGetAttribute", ctypes.byref(legacy), 10, ctypes.c_uint64(address))
    call("cuPointerGetAttribute", ctypes.byref(types), 14, ctypes.c_uint64(address))
    print(f"{size} bytes at {address - base.value} of an allocation of {whole.value}; legacy handle {legacy.value}, allowed types {types.value}")
    handle = (ctypes.c_ubyte * 64)()
    result = call("cuIpcGetMemHandle", handle, base)
    if result:
        print(f"| {kind:44} | no legacy handle: CUDA error {result}")
        return
    uuid = (ctypes.c_ubyte * 16)()
    device = ctypes.c_int()
    must("cuCtxGetDevice", ctypes.byref(device))
    must("cuDeviceGetUuid", uuid, device)
    h = bytes(uuid).hex()
    text = f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]} {bytes(handle).hex()} {address - base.value} {size}"
    run = [os.path.abspath(program), "-test.run=^TestGPUAdopt$", "-test.v"]
    environment = dict(os.environ, KVFERRY_CUDA_ADOPT=text, KVFERRY_CUDA_GPU="1")
    helper = subprocess.Popen(run, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.path.dirname(os.path.abspath(program)))
    out, _ = helper.communicate("write adopted by kvferry\n", timeout=40)
    said = [line for line in out.splitlines() if line.startswith("adopt: ")]
    print(*said, sep="\n")
    back = (ctypes.c_ubyte * 18)()
    must("cuMemcpyDtoH_v2", back, ctypes.c_uint64(address), ctypes.c_size_t(len(back)))
    same = bytes(back) == b"adopted by kvferry"
    print(f"| {kind:44} | {said[0][7:] if said else 'not adopted'}; what it wrote is here: {'yes' if same else bytes(back)}")
    del alive
    if helper.returncode or not same:
        raise SystemExit(f"the helper ended with {helper.returncode}: {out}")


main(sys.argv[1])
