#!/usr/bin/env python3
"""Protects: extract_hf.py. Sampling; the multimodal class; verifiers with and without shared K/V, against K/V computed anew;
refusals, each with a message that names what is wrong.
"""
import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from support import SAMPLE, check, good, refused, run, run_test, write_json, write_jsonl

import extract_hf
from of_sample import FP32, VERIFIER, content, prompts, same, sample


def samples(folder):
    """A sampled text depends on the line and the seed, not on what else is made."""
    lines = write_jsonl(folder / "few.jsonl", [dict(line, max_new_tokens=24) for line in prompts(3)])
    common = ("--verifier", VERIFIER, "--prompts", lines, "--ignore-eos", "--temperature", 1, "--top-k", 50, "--top-p", 0.95, *FP32)
    run(extract_hf.main, *common, "--out", folder / "seed0")
    run(extract_hf.main, *common, "--out", folder / "part", "--part", "1/2")
    run(extract_hf.main, *common, "--out", folder / "seed1", "--seed", 1)
    check([path.name for path in (folder / "part").glob("*.safetensors")] == ["sample_000001.safetensors"], "--part 1/2 of 3 lines")
    name = "sample_000001.safetensors"
    check(content(folder / "part" / name) == content(folder / "seed0" / name), "the part's sample is another")
    texts = [sample(folder / seed, index)["token_ids"].tolist() for seed in ("seed0", "seed1") for index in range(3)]
    check(all(a != b for a, b in zip(texts[:3], texts[3:])), "another seed samples the same text")


def wrapped(folder):
    """The multimodal class with the same text model writes the same samples, and mtp takes them."""
    config = json.loads((VERIFIER / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    vision = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    full = extract_hf.transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    torch.manual_seed(0)
    model = extract_hf.transformers.Gemma4ForConditionalGeneration(full).to(torch.bfloat16)
    weights = load_file(VERIFIER / "model.safetensors")
    left = model.model.language_model.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}, strict=False)
    check(not left.unexpected_keys and not left.missing_keys, f"weights of the wrapper: {left}")
    target = folder / "multimodal"
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(VERIFIER / name, target)
    lines, out = write_jsonl(folder / "prompts.jsonl", prompts(2)), folder / "of-multimodal"
    run(extract_hf.main, "--verifier", target, "--prompts", lines, "--out", out, "--ignore-eos", *FP32)
    for index in range(2):
        same(sample(out, index), load_file(SAMPLE / f"train/sample_{index:04d}.safetensors"), f"multimodal class, sample {index}")
    check(good(out, target)[0] == 2, "mtp check with the multimodal directory")


def computed_anew(folder):
    """Other shapes of verifier (random weights): K/V against the projections of the layer's input, longer than the window."""
    base = json.loads((VERIFIER / "config.json").read_text())
    cases = {"per-layer embeddings, shared K/V": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2048,
                                                  "attention_k_eq_v": False},
             "nothing shared": {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "output_hidden_states": False}}
    from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb
    for name, changes in cases.items():
        target = folder / name.replace(" ", "-").replace(",", "")
        torch.manual_seed(1)
        config = extract_hf.transformers.Gemma4TextConfig(**(base | changes))
        extract_hf.transformers.Gemma4ForCausalLM(config).save_pretrained(target)
        out = folder / f"of-{target.name}"
        lines = write_jsonl(folder / "random.jsonl", [{"token_ids": [2, 300, 301, 302], "max_new_tokens": 90}])
        run(extract_hf.main, "--verifier", target, "--prompts", lines, "--out", out, "--ignore-eos", *FP32,
            "--store-dtype", "float32")
        made, verifier = sample(out, 0), extract_hf.Verifier(target, torch.float32)
        inputs, hooks, normed = {}, [], {}
        owners = verifier.text.layer_types[: 6 - verifier.text.num_kv_shared_layers]
        layers = {kind: max(i for i, t in enumerate(owners) if t == layer_type) for kind, layer_type in extract_hf.KINDS.items()}
        for kind, layer in layers.items():
            hooks.append(verifier.backbone.layers[layer].self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, kind=kind: inputs.update({kind: (kwargs.get("hidden_states", *args[:1]), kwargs)}),
                with_kwargs=True))
        hooks.append(verifier.backbone.norm.register_forward_hook(lambda module, args, output: normed.update(x=output)))
        ids = made["token_ids"]
        with torch.no_grad():
            logits = verifier.model(input_ids=ids[None], use_cache=False).logits[0]
            check(torch.equal(logits[3:-1].argmax(-1), ids[4:]), f"{name}: the text is not greedy")
            check(torch.allclose(made["hidden_states"], normed["x"][0], atol=1e-5), f"{name}: hidden states")
            for kind, (x, kwargs) in inputs.items():
                attention = verifier.backbone.layers[layers[kind]].self_attn
                shape = (1, len(ids), -1, attention.head_dim)
                key = attention.k_proj(x).view(shape)
                value = attention.v_norm(attention.v_proj(x).view(shape) if attention.v_proj is not None else key)[0]
                key = apply_rotary_pos_emb(attention.k_norm(key), *kwargs["position_embeddings"], unsqueeze_dim=2)[0]
                check(torch.allclose(made[f"kv_last_{kind}_k"], key, atol=1e-5), f"{name}: {kind} K")
                check(torch.allclose(made[f"kv_last_{kind}_v"], value, atol=1e-5), f"{name}: {kind} V")
        check(good(out, target) == (1, 94, 90), f"{name}: mtp check")


def refusals(folder):
    def attempt(line, *options, says, verifier=VERIFIER):
        lines = write_jsonl(folder / "bad.jsonl", [line])
        shutil.rmtree(folder / "bad", ignore_errors=True)
        refused(extract_hf.main, "--verifier", verifier, "--prompts", lines, "--out", folder / "bad", *FP32, *options, says=says)
        check(not list((folder / "bad").glob("*.safetensors")), f"a sample was written: {says}")
    good = {"token_ids": [2, 300]}
    attempt({"token_ids": [2, 2048]}, says=["bad.jsonl:1", "token_ids[1] is 2048", "0 to 2047"])
    attempt({"promt": "x"}, says=["bad.jsonl:1", "exactly one of prompt, messages, token_ids", "promt"])
    attempt(good | {"prompt": "x"}, says=["exactly one of"])
    attempt(good | {"loss_mask": [0, 1]}, says=["--given"])
    attempt(good | {"loss_mask": [1]}, "--given", says=["loss_mask has 1 entries, the text 2 tokens"])
    attempt({"token_ids": [2] * 50}, "--max-length", 50, says=["50 tokens do not fit --max-length 50", "--overlong skip"])
    attempt(good, verifier=folder, says=["no config.json"])
    config = json.loads((VERIFIER / "config.json").read_text())
    for number, (change, says) in enumerate([
            ({"model_type": "llama"}, ["model_type is \"llama\""]), ({"use_bidirectional_attention": "all"}, ["encoder"]),
            ({"num_kv_shared_layers": 4}, ["no", "owns K/V"])]):
        target = folder / f"model{number}"
        shutil.copytree(VERIFIER, target)
        write_json(target / "config.json", config | change)
        attempt(good, verifier=target, says=says)
    attempt(good, verifier=SAMPLE / "drafter_reference", says=["gemma4_assistant", "give its verifier"])
    target = folder / "quantised-cache"
    shutil.copytree(VERIFIER, target)
    write_json(target / "generation_config.json", {"cache_implementation": "quantized", "eos_token_id": 1})
    attempt(good, verifier=target, says=["generation_config.json", "cache_implementation is \"quantized\""])
    target = folder / "not-whole"
    shutil.copytree(VERIFIER, target)
    weights = load_file(VERIFIER / "model.safetensors")
    del weights["model.layers.3.self_attn.k_norm.weight"]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    attempt(good, verifier=target, says=["missing keys", "k_norm"])


def body(folder):
    torch.set_num_threads(1)
    samples(folder)
    wrapped(folder)
    computed_anew(folder)
    refusals(folder)


if __name__ == "__main__":
    run_test("extract_models", body)
