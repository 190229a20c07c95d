#!/usr/bin/env python3
"""hf_load.py DRAFTER VERIFIER

Real transformers loads an exported drafter: no missing, unexpected or mismatched key, the head tied to the embedding,
token_ordering an int64 permutation, layer_scalar [1], widths and vocabulary those of the verifier, its tokenizer that of
the verifier.
"""
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    drafter, verifier = sys.argv[1:]
    model, info = AutoModelForCausalLM.from_pretrained(drafter, dtype="auto", output_loading_info=True)
    bad = [f"{kind}: {sorted(info[kind])}" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]]
    dtype = next(model.parameters()).dtype
    if dtype != torch.bfloat16:
        bad.append(f"weights are {dtype}")
    if model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        bad.append("lm_head is not tied")
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar") and tuple(buffer.shape) != (1,):
            bad.append(f"{name} has shape {tuple(buffer.shape)}")
        if name.endswith("token_ordering"):
            ids = buffer.flatten()
            if ids.dtype != torch.int64 or not torch.equal(ids.sort().values, torch.arange(len(ids))):
                bad.append(f"{name} is no int64 permutation")
    target = AutoConfig.from_pretrained(verifier).get_text_config()
    if model.config.backbone_hidden_size != target.hidden_size:
        bad.append(f"backbone_hidden_size {model.config.backbone_hidden_size}, verifier {target.hidden_size}")
    if model.config.get_text_config().vocab_size != target.vocab_size:
        bad.append("vocab_size differs from the verifier's")
    text = "The quick brown fox, 1984"
    if AutoTokenizer.from_pretrained(drafter)(text).input_ids != AutoTokenizer.from_pretrained(verifier)(text).input_ids:
        bad.append("the tokenizer differs from the verifier's")
    if not model.generation_config.num_assistant_tokens:
        bad.append("generation_config.json has no num_assistant_tokens")
    print(type(model).__name__, dtype, "; ".join(bad) or "ok")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
