#!/usr/bin/env python3
"""Writes training samples of a Gemma-4 verifier with vLLM, end to end, in two steps (two engines: they differ in settings).

  vllm_extract.py generate --verifier DIR --prompts prompts.jsonl --texts texts.jsonl    the verifier continues the prompts
  vllm_extract.py extract  --verifier DIR --prompts texts.jsonl   --out data/            samples of whole texts

The lines are those of extract_hf.py: `generate` takes prompts, `extract` takes what extract_hf.py takes with --given, and
what `generate` writes: {"token_ids", "prompt_len"}. Both go on where they stopped. Hidden states are before the final norm
and say so. vllm_connector.py says what it refuses, and what has been tried.
"""
import argparse
import json
import os
import pathlib
import sys
import time

for variable, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")):
    os.environ.setdefault(variable, value)
HERE = str(pathlib.Path(__file__).resolve().parent)
# the engine's processes import the connector by name
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from prompts import Reader, seed_of
from samples import ExtractError, Folder, Progress, check_config, cut_half_line, keep_settings, read_jsonl, run_program


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted")
    parser.add_argument("step", choices=("generate", "extract"))
    parser.add_argument("--verifier", required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL, see extract_hf.py --help")
    parser.add_argument("--texts", metavar="FILE", help="generate: the JSONL file to write; while it grows, FILE.part; FILE.settings keeps the settings")
    parser.add_argument("--out", metavar="DIR", help="extract: the folder of samples")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="longest document in tokens (default 4096)")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="generate: longest continuation (default 512)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="generate: 0 (default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="generate: default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="generate: of the sampling (default 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="generate: go on to --max-new-tokens")
    parser.add_argument("--regenerate", action="store_true",
                        help="generate: write the assistant's turn that ends messages anew")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's")
    parser.add_argument("--template-options", metavar="JSON", type=json.loads, default={}, help="variables for the chat template")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default bfloat16")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="documents given to the engine at once (default 256)")
    parser.add_argument("--engine", metavar="JSON", type=json.loads, default={},
                        help="more arguments of vllm.LLM, e.g. '{\"tensor_parallel_size\": 2, \"max_num_batched_tokens\": 8192}'")
    args = parser.parse_args()
    if (args.texts is None) == (args.step == "generate") or (args.out is None) == (args.step == "extract"):
        parser.error("generate needs --texts, extract needs --out")
    return args


def engine(args, **more):
    from vllm import LLM
    return LLM(**({"model": args.verifier, "dtype": args.dtype, "max_model_len": args.max_length + 1,
                   "enable_prefix_caching": False} | more | args.engine))


def batches(items, size):
    for first in range(0, len(items), size):
        yield items[first: first + size]


def reader_of(args, text, given):
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.verifier)
    except (OSError, ValueError):
        tokenizer = None
    if tokenizer is not None and args.chat_template:
        tokenizer.chat_template = pathlib.Path(args.chat_template).read_text(encoding="utf-8")
    return Reader(args.prompts, tokenizer, text.vocab_size, given, args.regenerate, args.template_options)


def too_long(document, room):
    if len(document.ids) <= room:
        return False
    print(f"left out: {document.where}: {len(document.ids)} tokens, there is room for {room} (--max-length)", file=sys.stderr)
    return True


def generate(args, reader):
    from vllm import SamplingParams
    part = pathlib.Path(args.texts + ".part")
    if pathlib.Path(args.texts).exists():
        raise ExtractError(f"{args.texts}: is there already; remove it to write it anew")
    keep = ("max_new_tokens", "temperature", "top_p", "seed", "ignore_eos", "regenerate", "dtype", "template_options")
    keep_settings(pathlib.Path(args.texts + ".settings"), {key: getattr(args, key) for key in keep} | {
        "verifier": pathlib.Path(args.verifier).resolve().name})
    if part.exists():
        cut_half_line(part)
    done = {line["line"] for _, line in read_jsonl(part)} if part.exists() else set()
    documents = [reader.document(*entry) for entry in reader.lines() if entry[0] not in done]
    documents = [document for document in documents if not too_long(document, args.max_length - 1)]
    llm = engine(args) if documents else None
    progress, made = Progress(len(documents), "texts"), 0
    with open(part, "a", encoding="utf-8") as file:
        for batch in batches(documents, args.batch):
            options = [SamplingParams(
                temperature=args.temperature, top_p=args.top_p, seed=seed_of(args.seed, document),
                max_tokens=min(document.max_new_tokens or args.max_new_tokens, args.max_length - len(document.ids)),
                ignore_eos=args.ignore_eos) for document in batch]
            outputs = llm.generate([{"prompt_token_ids": document.ids} for document in batch], options, use_tqdm=False)
            for document, output in zip(batch, outputs):
                ids = document.ids + list(output.outputs[0].token_ids)
                file.write(json.dumps({"line": document.index, "token_ids": ids, "prompt_len": len(document.ids)}) + "\n")
                made += 1
                progress.step(made, len(ids) - len(document.ids))
            file.flush()
            os.fsync(file.fileno())
    os.replace(part, args.texts)
    return f"{args.texts}: {made + len(done)} texts"


def wait_for(paths, seconds=120):
    """The connector writes in threads; a failed write leaves no file."""
    until = time.monotonic() + seconds
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > until:
            raise ExtractError(f"{len(missing)} samples were not written, the first is {missing[0]}; the engine's log says why")
        time.sleep(0.02)


def check_text(path, document):
    with safe_open(path, "pt") as file:
        if file.get_tensor("token_ids").tolist() != document.ids or file.get_tensor("loss_mask").tolist() != document.mask:
            raise ExtractError(f"{document.where}: the text is not the one that {path} was made from; give the old file, or another "
                               "--out")


def extract(args, reader, text):
    from vllm import SamplingParams
    folder = Folder(args.out, {"program": "vllm_extract.py", "verifier": pathlib.Path(args.verifier).resolve().name,
                               "dtype": args.dtype})
    documents, there = [], 0
    for index, number, line in reader.lines():
        path = folder.path / f"sample_{index:06d}.safetensors"
        folder.remove_remains(path.name)
        document = reader.document(index, number, line)
        if path.exists():
            check_text(path, document)
            there += 1
            continue
        if not too_long(document, args.max_length):
            documents.append((path, document))
    llm = engine(args, speculative_config={
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [text.num_hidden_layers]}}},
        kv_transfer_config={
            "kv_connector": "SampleConnector", "kv_role": "kv_producer", "kv_connector_module_path": "vllm_connector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder.path.resolve()),
                                          "use_synchronization_lock": False}}) if documents else None
    progress, tokens = Progress(len(documents)), 0
    for number, batch in enumerate(batches(documents, args.batch)):
        options = [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args={
            "kv_transfer_params": {"file": path.name, "loss_mask": document.mask}}) for path, document in batch]
        llm.generate([{"prompt_token_ids": document.ids} for _, document in batch], options, use_tqdm=False)
        wait_for([path for path, _ in batch])
        count = sum(len(document.ids) for _, document in batch)
        tokens += count
        progress.step(min((number + 1) * args.batch, len(documents)), count)
    return f"{args.out}: {len(documents)} written, {there} there; {tokens} tokens"


def main():
    args = parse()
    text = check_config(AutoConfig.from_pretrained(args.verifier), f"{args.verifier}/config.json")
    reader = reader_of(args, text, args.step == "extract")
    print(generate(args, reader) if args.step == "generate" else extract(args, reader, text), flush=True)
    return 0


if __name__ == "__main__":
    run_program(main)
