#!/usr/bin/env python3
"""make_samples.py VERIFIER SAMPLE_DIR OUT

Computes samples anew in fp32: OUT/samples has the texts and masks of SAMPLE_DIR with the hidden states and K/V of
transformers' fp32 forward pass, OUT/verifier the verifier with its weights stored as fp32. A server that runs in fp32
feeds its drafter these numbers; the stored bf16 ones flip a draft here and there.
"""
import pathlib
import shutil
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


@torch.no_grad()
def forward(model, ids):
    """Hidden states after the final norm [S, Hb] and, by layer type, K and V [S, heads, head_dim] that drafters read."""
    out = model(input_ids=ids[None], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    kv = {kind: tuple(x[0].transpose(0, 1).contiguous() for x in pair) for kind, pair in out.shared_kv_states.items()}
    return out.hidden_states[-1][0], kv, out.logits[0]


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    verifier, folder, out = (pathlib.Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    shutil.rmtree(out, ignore_errors=True)
    (out / "samples").mkdir(parents=True)
    shutil.copytree(verifier, out / "verifier")
    weights = load_file(verifier / "model.safetensors")
    save_file({name: t.float() if t.is_floating_point() else t for name, t in weights.items()},
              out / "verifier/model.safetensors", {"format": "pt"})
    paths, greedy = sorted(folder.glob("*.safetensors")), 0
    for path in paths:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        old = load_file(path)
        ids, mask = old["token_ids"], old["loss_mask"]
        hidden, kv, logits = forward(model, ids)
        first = int(mask.nonzero()[0])
        greedy += torch.equal(logits[first - 1: -1].argmax(-1), ids[first:])
        (local_k, local_v), (global_k, global_v) = kv["sliding_attention"], kv["full_attention"]
        save_file({"token_ids": ids, "loss_mask": mask, "hidden_states": hidden.contiguous(), "kv_last_local_k": local_k,
                   "kv_last_local_v": local_v, "kv_last_global_k": global_k, "kv_last_global_v": global_v},
                  out / "samples" / path.name, metadata)
    print(f"{out}: {len(paths)} samples, {greedy} of them the verifier's greedy text")


if __name__ == "__main__":
    main()
