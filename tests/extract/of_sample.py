"""Prompts of the shipped verifier, and samples compared."""
import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from support import SAMPLE, check

VERIFIER = SAMPLE / "verifier"
# One unit in the last place of bf16. On the machine that made the samples all values are equal to the bit; other BLAS kernels
# round fp32 sums differently, which moves a value across a bf16 boundary now and then: at most one value in a hundred.
UNIT, FEW = 2.0 ** -7, 0.01
FP32 = ("--dtype", "float32")


def prompts(count):
    with open(SAMPLE / "prompts.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:count]
    return [{"token_ids": row["prompt_ids"], "max_new_tokens": row["total_len"] - row["prompt_len"]} for row in rows]


def content(path):
    """Everything in a sample file. The package writes the metadata in any order, so the bytes may differ."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {key: file.get_tensor(key).view(torch.uint8).numpy().tobytes() for key in file.keys()}


def sample(folder, index):
    return load_file(folder / f"sample_{index:06d}.safetensors")


def same(ours, theirs, where):
    check(ours.keys() == theirs.keys(), f"{where}: keys {sorted(ours)}")
    for key, tensor in theirs.items():
        if not tensor.is_floating_point():
            check(torch.equal(ours[key], tensor), f"{where}: {key} differs")
            continue
        a, b = ours[key].float(), tensor.float()
        check(a.shape == b.shape, f"{where}: {key} has shape {tuple(a.shape)}")
        check(bool(((a - b).abs() <= UNIT * b.abs() + 1e-5).all()), f"{where}: {key} is off by {(a - b).abs().max():g}")
        check(float((a != b).float().mean()) <= FEW, f"{where}: {key}: too many values differ")
