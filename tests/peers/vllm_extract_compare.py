#!/usr/bin/env python3
"""vllm_extract_compare.py prompts SAMPLE OUT.jsonl        writes the prompts of vllm_extract.sh
   vllm_extract_compare.py samples SAMPLE VLLM_DIR HF_DIR  compares samples

Passes when ids and masks are equal and each tensor's difference, relative in the root of the mean square, is at most 1e-4 in
fp32; hidden states of vLLM are before the final norm, which is applied here. Also the greedy texts that vLLM wrote for the
sample's prompts must be the sample's.
"""
import json
import pathlib
import random
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "trainers/extract"))
from extract_hf import Verifier

TOLERANCE = 1e-4
LENGTHS = (7, 64, 65, 150, 333, 40)      # the window is 64
SHIPPED = 4


def write_prompts(sample, out):
    """Four prompts of the sample, continued to the sample's length, and random ones of LENGTHS tokens."""
    generator = random.Random(1)
    with open(sample / "prompts.jsonl", encoding="utf-8") as file:
        shipped = [json.loads(line) for line in file][:SHIPPED]
    lines = [{"token_ids": row["prompt_ids"], "max_new_tokens": row["total_len"] - row["prompt_len"]} for row in shipped]
    lines += [{"token_ids": [2] + [generator.randrange(300, 2048) for _ in range(length - 1)], "max_new_tokens": 1}
              for length in LENGTHS]
    pathlib.Path(out).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main():
    sample = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "prompts":
        return write_prompts(sample, sys.argv[3])
    torch.set_num_threads(1)
    ours, theirs = (pathlib.Path(argument) for argument in sys.argv[3:5])
    norm = Verifier(sample / "verifier", torch.float32, "cpu").backbone.norm
    bad, worst, names = 0, {}, sorted(path.name for path in theirs.glob("*.safetensors"))
    for number, name in enumerate(names):
        with safe_open(ours / name, "pt") as file:
            bad += file.metadata().get("hidden_norm") != "pre"
        got, want = load_file(ours / name), load_file(theirs / name)
        with torch.no_grad():
            got["hidden_states"] = norm(got["hidden_states"][:, -1])
        bad += got.keys() != want.keys()
        for key, tensor in want.items():
            if got[key].shape != tensor.shape or got[key].dtype != tensor.dtype:
                print(f"{name}: {key}: {got[key].dtype} {tuple(got[key].shape)}, extract_hf.py {tensor.dtype} {tuple(tensor.shape)}")
                bad += 1
            elif tensor.is_floating_point():
                error = float((got[key] - tensor).norm() / tensor.norm())
                worst[key] = max(worst.get(key, 0.0), error)
                bad += not error <= TOLERANCE
            else:
                bad += not torch.equal(got[key], tensor)
        if number < SHIPPED:
            bad += not torch.equal(got["token_ids"], load_file(sample / f"train/sample_{number:04d}.safetensors")["token_ids"])
    lengths = [len(load_file(theirs / name)["token_ids"]) for name in names]
    bad += len(names) != SHIPPED + len(LENGTHS)
    print(f"vLLM against transformers, {len(names)} texts of {min(lengths)} to {max(lengths)} tokens, fp32: largest relative difference "
          + ", ".join(f"{key} {error:.1e}" for key, error in worst.items()) + (f"; {bad} FAILED" if bad else ""))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
