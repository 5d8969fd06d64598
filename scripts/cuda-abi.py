"""cuda-abi.py constants|prototypes HEADER: C programs that compare our cuda.h
with another one (scripts/cuda-headers.sh).

constants: prints every constant, and every structure's size and offsets, as the
header that it is compiled with has them. What that one lacks is told as missing.
prototypes: all of our prototypes, behind the other header, in one unit: a
compiler refuses what differs."""

import re
import sys


def main(what: str, path: str) -> None:
    text = re.sub(r"/\*.*?\*/", "", open(path, encoding="utf-8").read(), flags=re.S)
    if what == "prototypes":
        print("#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>")
        for p in re.findall(r"^CUresult cu\w+\(.*?\);", text, flags=re.M | re.S):
            # Its last parameter points to an enum there, to an int here.
            if "cuGetProcAddress_v2" not in p:
                print(p)
        return
    print("#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{")
    for name in re.findall(r"^\t(CU\w+) = ", text, flags=re.M):
        print(f'\tprintf("{name} %lld\\n", (long long){name});')
    for name in re.findall(r"^#define (CU\w+) \(?(?:0x)?[0-9]", text, flags=re.M):
        if name != "CUDA_VERSION":
            print(f'\tprintf("{name} %lld\\n", (long long){name});')
    for name in re.findall(r"^#define (CU_STREAM\w+) \(\(", text, flags=re.M):
        print(f'\tprintf("{name} %lld\\n", (long long)(size_t){name});')
    structs = re.findall(r"^typedef struct \w+ \{([^\n]+)\} (\w+);$", text, flags=re.M)
    structs += re.findall(r"^typedef struct \w+ \{\n(.*?)\n\} (\w+);$", text, flags=re.M | re.S)
    for body, name in structs:
        print(f'\tprintf("sizeof {name} %zu\\n", sizeof({name}));')
        body = re.sub(r"\{[^{}]*\}", "", body)
        for member in body.split(";"):
            words = re.sub(r"\[[^]]*\]", "", member).replace("*", " ")
            for field in words.split(","):
                if field.split():
                    f = field.split()[-1]
                    print(f'\tprintf("{name}.{f} %zu\\n", offsetof({name}, {f}));')
    for name in "CUdeviceptr CUdevice CUcontext CUresult CUmemGenericAllocationHandle".split():
        print(f'\tprintf("sizeof {name} %zu\\n", sizeof({name}));')
    print("\treturn 0;\n}")


main(*sys.argv[1:])
