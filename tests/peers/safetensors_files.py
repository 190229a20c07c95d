#!/usr/bin/env python3
"""safetensors_files.py read FILE...     the Python package reads files that mtp wrote, and writes them back byte for byte
   safetensors_files.py write FOLDER     the Python package writes files with every dtype and shape that mtp must read

`write` makes FOLDER/0.safetensors and so on, few tensors each (`mtp inspect` lists the first eight), and beside each
FOLDER/0.txt with what it holds, one `dtype shape name` a line.
"""
import hashlib
import json
import pathlib
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}


def read(path):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if not tensors:
        sys.exit(f"{path}: no tensor")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "copy.safetensors"
        save_file(tensors, copy, metadata)
        ours, theirs = pathlib.Path(path).read_bytes(), copy.read_bytes()
    if ours != theirs:
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        size = int.from_bytes(ours[:8], "little")
        print("ours:  ", ours[8: 8 + size][:400])
        print("theirs:", theirs[8: 8 + size][:400])
        sys.exit(f"{path}: the package writes it differently, first at byte {first} (header: {size} bytes)")
    print(f"{path}: {len(tensors)} tensors, metadata {json.dumps(metadata)}, sha256 {hashlib.sha256(ours).hexdigest()[:16]}")


def write(folder):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for i, (dtype, name) in enumerate(NAMES.items()):
        shape = ((3, 5), (7,), (2, 3, 4), ())[i % 4]
        tensors[f"tensor.{name.lower()}"] = (torch.rand(shape, generator=generator) * 50).to(dtype)
    tensors["empty"] = torch.zeros(0, 4)
    tensors['quoted "name" \u00e9'] = torch.ones(2)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    for i in range(0, len(names), 7):
        part = {name: tensors[name] for name in names[i: i + 7]}
        save_file(part, folder / f"{i // 7}.safetensors", {"format": "pt", "note": 'line\nbreak, "quotes", \u2713'})
        lines = [f"{NAMES[tensor.dtype]} {list(tensor.shape)} {name}\n" for name, tensor in part.items()]
        (folder / f"{i // 7}.txt").write_text("".join(lines), encoding="utf-8")


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "read":
        for path in sys.argv[2:]:
            read(path)
    elif len(sys.argv) == 3 and sys.argv[1] == "write":
        write(sys.argv[2])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
