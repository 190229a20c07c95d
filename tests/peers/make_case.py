#!/usr/bin/env python3
"""make_case.py DRAFTER VERIFIER OUT SAMPLE... [--position-offset 0|1] [--num-speculative-steps K] [--max-rows N]

Writes a reference case for build/tests/golden (format: tests/data/goldens/README.md) out of real transformers: the
module as it is, in fp32, one query at a time with the K/V cut to what position t may see, teacher feeding, `masked` loss
(`flat` for a dense head), gradients from autograd. Running golden on it compares our hidden states, states and logits
with those of transformers on an exported drafter and stored samples.

--max-rows cuts each sample after that many supervised positions, to bound the time.
"""
import argparse
import json
import math
import pathlib
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

BETA, CENTROID_WEIGHT = 0.6, 0.1


def read_samples(paths, max_rows, num_steps):
    """Tensors and metadata of each sample, cut behind the targets of its first max_rows supervised positions."""
    samples = []
    for path in paths:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        first = int(tensors["loss_mask"].nonzero()[0])
        end = min(len(tensors["token_ids"]), first + max_rows + num_steps)
        samples.append(({name: t[:end].contiguous() for name, t in tensors.items()}, metadata))
    return samples


def visible_kv(sample, t, window):
    """What the drafter's layers read at position t: [1, heads, keys, head_dim], keys 0..t, sliding: the last `window`."""
    def cut(name, first):
        return sample[name][first: t + 1].float().transpose(0, 1).unsqueeze(0)
    first = max(0, t - window + 1)
    return {"full_attention": (cut("kv_last_global_k", 0), cut("kv_last_global_v", 0)),
            "sliding_attention": (cut("kv_last_local_k", first), cut("kv_last_local_v", first))}


class Head:
    """Losses of one row from the module's own output, and what a case records about its logits."""

    def __init__(self, model):
        self.model, self.table = model, model.model.embed_tokens.weight
        self.ordered = bool(model.config.use_ordered_embeddings)
        if self.ordered:
            self.order = model.masked_embedding.token_ordering.view(model.config.num_centroids, -1)
            self.top_k = model.config.centroid_intermediate_top_k

    def __call__(self, hidden, logits, target):
        zero = torch.zeros(())
        if not self.ordered:
            loss = torch.nn.functional.cross_entropy(logits[None], torch.tensor([target]))
            return loss, zero, {"logits": logits}
        scores = self.model.masked_embedding.centroids.weight @ hidden
        selected = torch.topk(scores, self.top_k).indices
        tokens = self.order[selected].reshape(-1)
        inside = torch.zeros(len(logits), dtype=torch.bool).index_fill_(0, tokens, True)
        if bool(logits[~inside].max() >= logits[inside].min()):
            raise SystemExit("transformers selected other centroids than the highest scores")
        own = int((self.order == target).any(1).nonzero()[0])
        candidates = selected.tolist() + ([own] if own not in selected.tolist() else [])
        ids = self.order[torch.tensor(candidates)].reshape(-1)
        log_q = torch.log_softmax(self.table[ids] @ hidden, 0)
        return (-log_q[int((ids == target).nonzero()[0])], -torch.log_softmax(scores, 0)[own],
                {"selected": selected, "selected_logits": logits[tokens]})


def unroll(model, table, samples, num_steps, offset):
    """All rows through num_steps draft steps; returns (total loss, tensors of expected.safetensors)."""
    head, window = Head(model), model.config.text_config.sliding_window
    width = model.config.backbone_hidden_size
    scale = torch.tensor(math.sqrt(width), dtype=table.dtype)
    rows = [(s, t) for s, (d, _) in enumerate(samples) for t in range(len(d["token_ids"]) - 2)
            if bool(d["loss_mask"][t + 2: t + 2 + num_steps].any())]
    record = {f"step{k}.{name}": torch.zeros(len(rows), dtype=torch.int64)
              for k in range(num_steps) for name in ("valid", "supervised", "input_token", "target")}
    losses = [[torch.zeros(()) for _ in range(num_steps)] for _ in rows]
    centroid_losses = [[torch.zeros(()) for _ in range(num_steps)] for _ in rows]
    seen = {}
    model.model.register_forward_hook(lambda module, args, out: seen.__setitem__("hidden", out.last_hidden_state))
    for r, (s, t) in enumerate(rows):
        sample = samples[s][0]
        tokens = sample["token_ids"].tolist()
        state, kv = sample["hidden_states"][t].float(), visible_kv(sample, t, window)
        for k in range(min(num_steps, len(tokens) - t - 2)):
            token, target = tokens[t + 1 + k], tokens[t + 2 + k]
            embedding = (table[token] * scale).float()
            out = model(inputs_embeds=torch.cat([embedding, state])[None, None],
                        position_ids=torch.tensor([[t + offset]]), shared_kv_states=kv)
            hidden, state = seen["hidden"][0, 0], out.last_hidden_state[0, 0]
            loss, centroid_loss, extra = head(hidden, out.logits[0, 0], target)
            supervised = bool(sample["loss_mask"][t + 2 + k])
            if supervised:
                losses[r][k], centroid_losses[r][k] = loss, centroid_loss
            for name, value in (("valid", 1), ("supervised", int(supervised)), ("input_token", token), ("target", target)):
                record[f"step{k}.{name}"][r] = value
            for name, value in {"hidden": hidden, "state": state, **extra}.items():
                key = f"step{k}.{name}"
                if key not in record:
                    record[key] = torch.zeros(len(rows), *value.shape, dtype=value.dtype)
                record[key][r] = value.detach()
    step, centroid_step = [], []
    for k in range(num_steps):
        count = max(1, int(record[f"step{k}.supervised"].sum()))
        step.append(sum(row[k] for row in losses) / count)
        centroid_step.append(sum(row[k] for row in centroid_losses) / count)
    weights = [BETA ** k for k in range(num_steps)]
    weight = CENTROID_WEIGHT if head.ordered else 0.0
    total = sum(w / sum(weights) * (a + weight * b) for w, a, b in zip(weights, step, centroid_step))
    record["rows.sample"] = torch.tensor([s for s, _ in rows])
    record["rows.position"] = torch.tensor([t for _, t in rows])
    record["loss.rows"] = torch.tensor([[float(x.detach()) for x in row] for row in losses])
    record["loss.centroid_rows"] = torch.tensor([[float(x.detach()) for x in row] for row in centroid_losses])
    record["loss.step"] = torch.stack(step).detach()
    record["loss.centroid_step"] = torch.stack(centroid_step).detach()
    record["loss.total"] = total.detach().reshape(1)
    return total, record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=pathlib.Path)
    parser.add_argument("verifier", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("samples", type=pathlib.Path, nargs="+")
    parser.add_argument("--position-offset", type=int, choices=(0, 1), default=0)
    parser.add_argument("--num-speculative-steps", type=int, default=3)
    parser.add_argument("--max-rows", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)

    model = AutoModelForCausalLM.from_pretrained(args.drafter, dtype=torch.float32).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.requires_grad_(True)
    with safe_open(args.verifier / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight")
    samples = read_samples(args.samples, args.max_rows, args.num_speculative_steps)
    total, record = unroll(model, table, samples, args.num_speculative_steps, args.position_offset)
    total.backward()
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        if tensor.requires_grad:
            record["grad." + name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    shutil.rmtree(args.out, ignore_errors=True)
    (args.out / "samples").mkdir(parents=True)
    shutil.copytree(args.drafter, args.out / "assistant")
    shutil.copytree(args.verifier, args.out / "verifier")
    for path, (tensors, metadata) in zip(args.samples, samples):
        save_file(tensors, args.out / "samples" / path.name, metadata)
    save_file({name: t.detach().contiguous() for name, t in record.items()}, args.out / "expected.safetensors")
    case = {"K": args.num_speculative_steps, "mode": "masked" if model.config.use_ordered_embeddings else "flat",
            "feeding": "teacher", "position_offset": args.position_offset, "beta": BETA,
            "centroid_weight": CENTROID_WEIGHT if model.config.use_ordered_embeddings else 0.0, "kd": None,
            "name": args.out.name, "rows": len(record["rows.sample"])}
    (args.out / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    print(f"{args.out}: {case['rows']} rows, loss {float(total.detach()):.6f}")


if __name__ == "__main__":
    main()
