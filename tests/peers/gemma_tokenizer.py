#!/usr/bin/env python3
"""gemma_tokenizer.py DIR      gives a model directory a tokenizer of Gemma's kind, of the size of its vocabulary

The tokenizer of the sample is a byte-level BPE; llama.cpp's converter accepts Gemma's kind only (BPE with byte fall-back).
The tokens are names without a meaning; the converter stores them and looks at nothing else.
"""
import json
import pathlib
import sys


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]["vocab_size"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [f"token{i}" for i in range(len(tokens), size)]
    added = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, name in enumerate(special)]
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "pre_tokenizer": None,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens[:size])}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    main()
