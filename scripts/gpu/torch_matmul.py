"""torch_matmul.py: a process that multiplies matrices on the device for half a
second for every line that it is told, and says how many that were a second."""

import sys
import time

import torch  # type: ignore

a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
c = torch.matmul(a, b)
torch.cuda.synchronize()
print(f"busy: products of 4096 x 4096, PyTorch {torch.__version__}", flush=True)
for _ in sys.stdin:
    n, begin = 0, time.monotonic()
    while time.monotonic() - begin < 0.5:
        for _ in range(4):
            torch.matmul(a, b, out=c)
        torch.cuda.synchronize()
        n += 4
    print(f"busy: {n / (time.monotonic() - begin)}", flush=True)
