#!/usr/bin/env python3
"""Writes training samples of a Gemma-4 verifier with transformers.

Each line of PROMPTS becomes one document, the verifier continues it (or the text is given), one forward pass over the
whole text gives hidden states after the final norm and, for every position, the K/V of the last sliding and the last
full-attention layer that own K/V. One sample file a line: OUT/sample_LINE.safetensors (lib/data/README.md), LINE from 0.

The same command goes on where it stopped: whole files stay, the rest is written. A line's result depends on nothing but
the line, the settings and --seed, so it does not matter where it stopped.
"""
import argparse
import hashlib
import json
import pathlib
import sys

import torch
import transformers
from safetensors import safe_open

from prompts import Reader, seed_of
from samples import ExtractError, Folder, Progress, check_config, check_sample, kv_layers, kv_shape, metadata, \
    run_program, write_sample, KINDS

LINES = """lines of PROMPTS, each a JSON object with one of:
  {"prompt": "text"}                     <bos> is put in front unless the text begins with it
  {"messages": [{"role", "content"}…]}   through the tokenizer's chat template
  {"token_ids": [2, …]}                  as they are
and optionally "max_new_tokens": N, in place of --max-new-tokens.
With --given nothing is generated, and each line also has one of:
  "continuation": text or token ids      follows the prompt; its tokens are the targets
  "loss_mask": [0, 1, …]                 with token_ids: 1 = may be a target
  "prompt_len": N                        with token_ids: the first N are no targets
  (none, for messages that end with the assistant's turn: that turn is the target)
Other keys are passed over.

exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__, epilog=LINES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", required=True, metavar="DIR", help="model directory: text-only or multimodal Gemma 4")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL, see below")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the samples; made if it is not there")
    parser.add_argument("--given", action="store_true", help="the lines hold the whole text; generate nothing")
    parser.add_argument("--regenerate", action="store_true",
                        help="messages that end with the assistant's turn: the verifier writes that turn anew")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N",
                        help="longest continuation (default 512)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens; no end-of-text token is written")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy; above: sampled")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="sample among the N likeliest (default 0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest with sum P (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default 0)")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="longest document in tokens (default 4096)")
    parser.add_argument("--overlong", choices=("error", "skip"), default="error",
                        help="a prompt or given text that does not fit --max-length: end (default), or leave it out and say so")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's")
    parser.add_argument("--template-options", metavar="JSON", default="{}",
                        help="variables for the chat template, e.g. '{\"enable_thinking\": true}'")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="type the verifier computes in (default bfloat16)")
    parser.add_argument("--store-dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="type of hidden states and K/V in the files (default bfloat16)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 … (default: cuda if there is one, else cpu)")
    parser.add_argument("--device-map", metavar="MAP", help="spread a large verifier over devices, e.g. auto; needs accelerate")
    parser.add_argument("--part", default="0/1", metavar="I/N",
                        help="lines I, I+N, I+2N … only: run N of these at once into one folder, one a GPU (default 0/1)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N lines of the file")
    parser.add_argument("--name", metavar="TEXT", help="verifier's name in the metadata (default: its folder's name)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    args = parser.parse_args()
    try:
        args.part = tuple(int(number) for number in args.part.split("/"))
        if len(args.part) != 2 or not 0 <= args.part[0] < args.part[1]:
            raise ValueError
    except ValueError:
        parser.error("--part: expected I/N with 0 <= I < N")
    try:
        args.template_options = json.loads(args.template_options)
        if not isinstance(args.template_options, dict):
            raise ValueError("no object")
    except ValueError as error:
        parser.error(f"--template-options: no JSON object: {error}")
    for name, least in (("max_new_tokens", 1), ("max_length", 2), ("top_k", 0), ("temperature", 0.0), ("limit", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}: {value} is below {least}")
    if not 0 < args.top_p <= 1:
        parser.error("--top-p: expected above 0 and at most 1")
    if args.given and (args.regenerate or args.temperature or args.ignore_eos):
        parser.error("--given generates nothing: --regenerate, --temperature and --ignore-eos do not go with it")
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        parser.error("--top-k and --top-p need --temperature above 0")
    if args.device and args.device_map:
        parser.error("give --device or --device-map")
    return args


class Verifier:
    """A Gemma-4 model: continues text, and gives what the drafter reads."""

    def __init__(self, folder, dtype, device=None, device_map=None):
        if not pathlib.Path(folder, "config.json").is_file():
            raise ExtractError(f"{folder}: no config.json; give the directory of a model")
        config = transformers.AutoConfig.from_pretrained(folder)
        text = check_config(config, f"{folder}/config.json")
        text.output_hidden_states = config.output_hidden_states = False
        auto = transformers.AutoModelForCausalLM if config is text else transformers.AutoModelForImageTextToText
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model, loading = auto.from_pretrained(folder, config=config, dtype=dtype, device_map=device_map,
                                                   output_loading_info=True)
        for kind in ("missing_keys", "mismatched_keys"):
            if loading[kind]:
                raise ExtractError(f"{folder}: {kind.replace('_', ' ')} in the weights, e.g. {sorted(loading[kind])[0]}; the "
                                   "directory is not whole")
        self.model.eval()
        if device_map is None:
            self.model.to(self.device)
        generation = self.model.generation_config
        if getattr(generation, "cache_implementation", None) == "quantized":
            raise ExtractError(f"{folder}/generation_config.json: cache_implementation is \"quantized\"; a drafter needs the K/V "
                               "as the verifier computes it. Remove the entry")
        eos = generation.eos_token_id if generation.eos_token_id is not None else text.eos_token_id
        self.eos = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
        self.backbone = self._find_backbone(folder)
        self.text = self.backbone.config
        # On, every forward pass records every layer. Off, transformers 5.24 fails where K/V are shared and there are no
        # per-layer embeddings: it cuts what the sharing layers read to the tokens asked for, also what is None.
        self.text.output_hidden_states = bool(self.text.num_kv_shared_layers and not self.text.hidden_size_per_layer_input)
        self.layers = kv_layers(self.text)

    def _find_backbone(self, folder):
        """The text model inside: without head, vision and audio."""
        inner = self.model.model
        backbone = getattr(inner, "language_model", inner)
        if not hasattr(backbone, "layers") or not hasattr(backbone, "norm"):
            raise ExtractError(f"{folder}: {type(self.model).__name__} has no text model with layers and norm; transformers "
                               f"{transformers.__version__} is not known to this program")
        return backbone

    @torch.no_grad()
    def forward(self, ids):
        """hidden_states [S, Hb] after the final norm and {kind: (K, V)}, each [S, NKV, D], in the computing type.

        No cache is used, so the K/V are those that attention reads, all S positions, whatever the window is."""
        out = self.backbone(input_ids=ids[None].to(self.backbone.embed_tokens.weight.device), use_cache=False,
                            return_shared_kv_states=True)
        shared = getattr(out, "shared_kv_states", None)
        if shared is None:
            raise ExtractError(f"transformers {transformers.__version__} does not return shared_kv_states; 5.19 and 5.24 do")
        kv = {}
        for kind in self.layers:
            key, value = (tensor[0].transpose(0, 1) for tensor in shared[KINDS[kind]])
            want = (len(ids), *kv_shape(self.text, kind))
            if tuple(key.shape) != want or tuple(value.shape) != want:
                raise ExtractError(f"{kind} K/V have shapes {tuple(key.shape)} and {tuple(value.shape)}, expected {want}")
            kv[kind] = (key, value)
        return out.last_hidden_state[0], kv

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, seed, temperature, top_k, top_p, ignore_eos):
        """ids and their continuation. Nothing of the model's generation_config but the ends of text is used."""
        options = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        config = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens if ignore_eos else None,
            pad_token_id=self.text.pad_token_id, eos_token_id=self.eos or None, bos_token_id=self.text.bos_token_id, **options)
        # generate() fills in what is left open from the model's own; it must not
        self.model.generation_config = config
        torch.manual_seed(seed)
        prompt = ids[None].to(self.backbone.embed_tokens.weight.device)
        return self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[0].cpu()


def sample(verifier, document, args, header):
    """(tensors, tokens) of a document."""
    ids = torch.tensor(document.ids, dtype=torch.int64)
    if document.mask is None:
        room = args.max_length - len(ids)
        prompt_len = len(ids)
        ids = verifier.generate(ids, min(document.max_new_tokens or args.max_new_tokens, room),
                                seed_of(args.seed, document), args.temperature, args.top_k, args.top_p,
                                args.ignore_eos)
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        mask[prompt_len:] = 1
    else:
        mask = torch.tensor(document.mask, dtype=torch.uint8)
    hidden, kv = verifier.forward(ids)
    store = getattr(torch, args.store_dtype)
    tensors = {"token_ids": ids, "hidden_states": hidden.to("cpu", store), "loss_mask": mask}
    for kind, pair in kv.items():
        for part, tensor in zip("kv", pair):
            tensors[f"kv_last_{kind}_{part}"] = tensor.to("cpu", store)
    check_sample(tensors, verifier.text, document.where)
    return tensors


def fits(document, args):
    need = len(document.ids) + (document.mask is None)
    if need <= args.max_length:
        return True
    says = f"{document.where}: {len(document.ids)} tokens do not fit --max-length {args.max_length}"
    if args.overlong == "error":
        raise ExtractError(f"{says}; raise it, or leave such lines out with --overlong skip")
    print(f"left out: {says}", file=sys.stderr)
    return False


def settings_of(args, template):
    """What must be the same when a folder is gone on with. Not --max-length, which may have to be raised to go on. The prompts
    file may grow; each sample carries the digest of its line, which may not change."""
    keep = ("given", "regenerate", "max_new_tokens", "ignore_eos", "temperature", "top_k", "top_p", "seed", "dtype", "store_dtype",
            "template_options")
    config = pathlib.Path(args.verifier, "config.json").read_bytes()
    return {key: getattr(args, key) for key in keep} | {
        "program": "extract_hf.py", "verifier": args.name, "verifier_config": hashlib.sha256(config).hexdigest()[:16],
        "chat_template": hashlib.sha256((template or "").encode()).hexdigest()[:16], "parts": args.part[1]}


def load_tokenizer(args):
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.verifier)
    except (OSError, ValueError):
        return None  # said where a line needs one
    if args.chat_template:
        tokenizer.chat_template = pathlib.Path(args.chat_template).read_text(encoding="utf-8")
    return tokenizer


def line_digest(line):
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]


def check_line(path, line, where):
    with safe_open(path, "pt") as file:
        stored = (file.metadata() or {}).get("line")
    if stored != line_digest(line):
        raise ExtractError(f"{where}: the line is not the one that {path} was made from; give the old prompts file, or "
                           "another --out")


def main():
    args = parse()
    transformers.utils.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.name = args.name or pathlib.Path(args.verifier).resolve().name
    if not pathlib.Path(args.verifier, "config.json").is_file():
        raise ExtractError(f"{args.verifier}: no config.json; give the directory of a model")
    tokenizer = load_tokenizer(args)
    folder = Folder(args.out, settings_of(args, tokenizer and tokenizer.chat_template), "{}-of-{}".format(*args.part))
    verifier = Verifier(args.verifier, getattr(torch, args.dtype), args.device, args.device_map)
    reader = Reader(args.prompts, tokenizer, verifier.text.vocab_size, args.given, args.regenerate, args.template_options)
    header = metadata(verifier.text, args.name, "post", getattr(torch, args.store_dtype), compute_dtype=args.dtype,
                      made_by=f"extract_hf.py, transformers {transformers.__version__}",
                      **{f"{kind}_layer": layer for kind, layer in verifier.layers.items()})
    lines = [entry for entry in reader.lines() if (args.limit is None or entry[0] < args.limit)
             and entry[0] % args.part[1] == args.part[0]]
    progress, counts = Progress(len(lines)), {"written": 0, "there": 0, "left out": 0}
    tokens = targets = 0
    for done, (index, number, line) in enumerate(lines, 1):
        name = f"sample_{index:06d}.safetensors"
        folder.remove_remains(name)
        path = folder.path / name
        if path.exists():
            check_line(path, line, f"{args.prompts}:{number}")
            counts["there"] += 1
            continue
        document = reader.document(index, number, line)
        if not fits(document, args):
            counts["left out"] += 1
            continue
        tensors = sample(verifier, document, args, header)
        write_sample(path, tensors, header | {"line": line_digest(line)})
        counts["written"] += 1
        tokens += len(tensors["token_ids"])
        targets += int(tensors["loss_mask"].sum())
        progress.step(done, len(tensors["token_ids"]))
    print(f"{args.out}: " + ", ".join(f"{count} {what}" for what, count in counts.items())
          + f"; {tokens} tokens written, {targets} of them targets")
    return 0


if __name__ == "__main__":
    run_program(main)
