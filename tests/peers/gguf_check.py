#!/usr/bin/env python3
"""gguf_check.py FILE.gguf DRAFTER      the fp32 GGUF of a drafter holds what llama.cpp's runtime asks for, and its weights

Needs llama.cpp's gguf package on PYTHONPATH; llamacpp.sh calls it.
"""
import json
import pathlib
import sys

import gguf
import numpy
from safetensors.torch import load_file

LAYER = {"attn_norm": "input_layernorm.weight", "attn_q": "self_attn.q_proj.weight",
         "attn_q_norm": "self_attn.q_norm.weight", "attn_output": "self_attn.o_proj.weight",
         "post_attention_norm": "post_attention_layernorm.weight", "layer_output_scale": "layer_scalar",
         "ffn_norm": "pre_feedforward_layernorm.weight", "ffn_gate": "mlp.gate_proj.weight",
         "ffn_up": "mlp.up_proj.weight", "ffn_down": "mlp.down_proj.weight",
         "post_ffw_norm": "post_feedforward_layernorm.weight"}
WHOLE = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight",
         "nextn.pre_projection": "pre_projection.weight", "nextn.post_projection": "post_projection.weight"}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    drafter = pathlib.Path(sys.argv[2])
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    weights = load_file(drafter / "model.safetensors")
    reader = gguf.GGUFReader(sys.argv[1])
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer")}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    layers = config["text_config"]["num_hidden_layers"]
    bad = []
    wanted = {"general.architecture": "gemma4-assistant", "gemma4-assistant.block_count": layers,
              "gemma4-assistant.nextn_predict_layers": layers,
              "gemma4-assistant.embedding_length": config["text_config"]["hidden_size"],
              "gemma4-assistant.embedding_length_out": config["backbone_hidden_size"]}
    bad += [f"{name} is {fields.get(name)}, not {value}" for name, value in wanted.items() if fields.get(name) != value]
    names = {f"{gguf_name}.weight": name for gguf_name, name in WHOLE.items()}
    for i in range(layers):
        names.update({f"blk.{i}.{gguf_name}.weight": f"model.layers.{i}.{name}" for gguf_name, name in LAYER.items()})
    for gguf_name, name in names.items():
        if gguf_name not in tensors:
            bad.append(f"{gguf_name} is missing")
            continue
        values = weights[name].float().numpy()
        if not numpy.array_equal(tensors[gguf_name].reshape(values.shape), values):
            bad.append(f"{gguf_name} differs from {name}")
    if "rope_freqs.weight" not in tensors:
        bad.append("rope_freqs.weight is missing")
    print(f"{len(tensors)} tensors, {len(names)} compared: {'; '.join(bad) or 'ok'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
