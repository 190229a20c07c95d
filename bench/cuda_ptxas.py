#!/usr/bin/env python3
"""cuda_ptxas.py LOG...: registers, shared memory and spills of every CUDA kernel, from the output of a build with
-DMTP_CUDA=ON (ptxas prints them), as the Markdown table that is kept in bench/results/cuda_ptxas.md. Exit code 1 when a
kernel spills registers, or when a log names no kernel."""
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def kernels(lines):
    """(symbol, architecture) -> registers, static shared bytes, spilled bytes."""
    found, key, spilled = {}, None, 0
    for line in lines:
        if match := ENTRY.search(line):
            key, spilled = (match[1], match[2]), 0
        elif key and (match := FRAME.search(line)):
            spilled = int(match[2]) + int(match[3])
        elif key and (match := USED.search(line)):
            shared = SHARED.search(line)
            found[key] = (int(match[1]), int(shared[1]) if shared else 0, spilled)
            key = None
    return found


def readable(symbols):
    """Symbols without namespaces and parameters, as c++filt gives them."""
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    names = []
    for name in text.splitlines():
        name = re.sub(r"\(anonymous namespace\)|_GLOBAL__N__\w+", "", name)
        name = re.sub(r"\((mtp::)?\w*\)(-?\d+)", r"\2", name).removeprefix("void ")
        name = re.sub(r"\(bool\)|\(int\)", "", name)
        depth, end = 0, len(name)
        for i, c in enumerate(name):
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0:
                end = i
                break
        names.append(re.sub(r"\b(mtp|std)::|::(?=\w)|(?<=[<, ])::", "", name[:end]))
    return dict(zip(symbols, names))


def main(paths):
    found = {}
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as log:
            found.update(kernels(log))
    if not found:
        print("no kernel in", *paths, file=sys.stderr)
        return 1
    names = readable(sorted({symbol for symbol, _ in found}))
    archs = sorted({arch for _, arch in found}, key=lambda arch: int(arch[3:]))
    print("# CUDA kernels: registers and shared memory")
    print("Registers a thread and bytes of static shared memory of each kernel, as ptxas reports them (bench/cuda_ptxas.py)."
          "\nDynamic shared memory is chosen at the launch.\n")
    print("| kernel |", " | ".join(archs), "|")
    print("|---|" + "---|" * len(archs))
    spills = []
    for symbol in sorted(names, key=names.get):
        cells = []
        for arch in archs:
            registers, shared, spilled = found.get((symbol, arch), (None, 0, 0))
            cells.append("" if registers is None else f"{registers}" + (f" / {shared}" if shared else ""))
            if spilled:
                spills.append(f"{names[symbol]} for {arch}: {spilled} bytes")
        print(f"| `{names[symbol]}` |", " | ".join(cells), "|")
    print(f"\n{len(names)} kernels, {len(spills) or 'none'} of them with spills.")
    for spill in spills:
        print("spills:", spill, file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1:]))
