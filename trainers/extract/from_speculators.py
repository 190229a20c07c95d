#!/usr/bin/env python3
"""Turns what speculators 0.9 prepared into our samples, as far as that is possible.

DATA is the folder that speculators' prepare-data wrote: an Arrow data set with input_ids, loss_mask and seq_len, one row for
each assistant turn; beside it, or in --hidden-states, hs_ROW.safetensors with token_ids [S] and hidden_states [S, layers, Hb]
(bf16, or fp8 with hidden_states_scales).

speculators stores no K/V, and a Gemma-4 drafter reads the verifier's K/V: hidden states cannot be turned into them. So:
  prompts   always possible: token ids and masks as lines for `extract_hf.py --given`, which computes hidden states and K/V
  samples   whole sample files, when the K/V are there: in the hs files themselves (vllm_connector.py run by speculators
            in place of its own connector writes them), or in files of another extraction of the same tokens (--kv)
  sidecar   hs files that hold K/V stay where they are; only their masks are written, as loss_mask.jsonl beside them

The last of the layers is the one used; speculators has the verifier write it before the final norm, so samples say
hidden_norm = pre and mtp applies the norm. fp8 stays fp8, bit for bit. A mask means the same here and there: 1 = the loss may
ask for this token.
"""
import argparse
import json
import pathlib
import sys

import torch
from datasets import load_from_disk
from safetensors import safe_open
from transformers import AutoConfig

from samples import ExtractError, Folder, Progress, check_config, check_sample, kv_layers, metadata, run_program, write_sample, \
    write_text

COLUMNS = ("input_ids", "loss_mask", "seq_len")
SCALES = "hidden_states_scales"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted")
    parser.add_argument("what", choices=("prompts", "samples", "sidecar"), help="what to make, see above")
    parser.add_argument("data", metavar="DATA", help="folder of speculators' prepared data (Arrow)")
    parser.add_argument("--out", metavar="PATH", help="prompts: the JSONL file; samples: the folder. sidecar writes beside the hs files")
    parser.add_argument("--hidden-states", metavar="DIR", help="folder of the hs_ROW.safetensors (default: DATA/hidden_states)")
    parser.add_argument("--kv", metavar="DIR",
                        help="samples: take the K/V from hs_ROW.safetensors or sample_ROW.safetensors (six digits) in this folder")
    parser.add_argument("--verifier", metavar="DIR", help="samples and sidecar: the verifier (its config.json is read)")
    parser.add_argument("--name", metavar="TEXT", help="verifier's name in the metadata (default: its folder's name)")
    parser.add_argument("--on-bad", choices=("error", "skip"), default="error",
                        help="a row that does not fit its file: end (default), or leave it out and say so")
    args = parser.parse_args()
    if args.what in ("prompts", "samples") and not args.out:
        parser.error(f"{args.what} needs --out")
    if args.what == "sidecar" and (args.out or args.kv):
        parser.error("sidecar writes loss_mask.jsonl beside the hs files: --out and --kv do not go with it")
    if args.what == "prompts" and (args.kv or args.hidden_states or args.verifier):
        parser.error("prompts reads the Arrow data only: --kv, --hidden-states and --verifier do not go with it")
    if args.what != "prompts" and not args.verifier:
        parser.error(f"{args.what} needs --verifier")
    args.hidden_states = pathlib.Path(args.hidden_states or pathlib.Path(args.data, "hidden_states"))
    return args


def read_rows(path):
    """The Arrow data set, its columns checked. Rows are read when asked for."""
    try:
        rows = load_from_disk(path)
    except (FileNotFoundError, ValueError) as error:
        raise ExtractError(f"{path}: no data set on disk: {error}") from None
    missing = [name for name in COLUMNS if name not in getattr(rows, "column_names", ())]
    if missing:
        raise ExtractError(f"{path}: columns {getattr(rows, 'column_names', 'of several splits')}; {', '.join(missing)} missing. "
                           "Give the folder that speculators' prepare-data wrote")
    return rows.with_format(None)


def read_row(rows, row, path):
    """(token ids, mask) of a row as lists."""
    entry = rows[row]
    ids, mask, length = (entry[name] for name in COLUMNS)
    where = f"{path}, row {row}"
    if len(ids) != len(mask) or len(ids) != length:
        raise ExtractError(f"{where}: {len(ids)} input_ids, {len(mask)} entries in loss_mask, seq_len {length}; they must agree")
    if not ids or any(value not in (0, 1) for value in mask):
        raise ExtractError(f"{where}: " + ("has no token" if not ids else "loss_mask has values other than 0 and 1"))
    return [int(token) for token in ids], [int(value) for value in mask]


def same_tokens(file, ids, path):
    if "token_ids" not in file.keys():
        raise ExtractError(f"{path}: no token_ids; keys {sorted(file.keys())}")
    stored = file.get_tensor("token_ids").flatten().tolist()
    if stored != ids:
        first = next((i for i, (a, b) in enumerate(zip(stored, ids)) if a != b), min(len(stored), len(ids)))
        raise ExtractError(f"{path}: token_ids are not those of the row, first difference at token {first} ({len(stored)} and "
                           f"{len(ids)} tokens); the file belongs to another data set")


def open_file(path):
    try:
        return safe_open(path, "pt")
    except Exception as error:  # the package has no class of its own for all of it
        raise ExtractError(f"{path}: cannot be read ({error}); speculators may have been stopped while it moved the file. "
                           "Remove it and have it made again") from None


def kv_keys(text):
    return [f"kv_last_{kind}_{part}" for kind in kv_layers(text) for part in "kv"]


def last_hidden(file, text, path):
    """{hidden_states [S, Hb]} of the last layer, with {scales [S]} for fp8."""
    hidden = file.get_tensor("hidden_states")
    if hidden.dim() == 3:
        hidden = hidden[:, -1]
    if hidden.dim() != 2 or hidden.shape[1] != text.hidden_size:
        raise ExtractError(f"{path}: hidden_states has shape {list(file.get_slice('hidden_states').get_shape())}; the verifier's "
                           f"hidden_size is {text.hidden_size}")
    fp8 = hidden.dtype == torch.float8_e4m3fn
    if fp8 != (SCALES in file.keys()):
        raise ExtractError(f"{path}: hidden_states is {hidden.dtype}, {SCALES} is {'missing' if fp8 else 'there'}")
    if not fp8:
        return {"hidden_states": hidden}
    scales = file.get_tensor(SCALES)
    if scales.numel() != len(hidden):
        raise ExtractError(f"{path}: {SCALES} has shape {list(scales.shape)}; expected one a token, [{len(hidden)}, 1, 1]")
    return {"hidden_states": hidden, SCALES: scales.reshape(-1)}


def norm_side(file, path):
    said = (file.metadata() or {}).get("hidden_norm", "pre")  # speculators' files have no metadata and are before the norm
    if said not in ("pre", "post"):
        raise ExtractError(f"{path}: metadata hidden_norm is \"{said}\"; expected pre or post")
    return said


def kv_of(args, row, ids, file, text):
    """The K/V of a row, from its own file or from --kv."""
    keys = kv_keys(text)
    if args.kv is None:
        missing = [key for key in keys if key not in file.keys()]
        if missing:
            raise ExtractError(
                f"{args.hidden_states / f'hs_{row}.safetensors'}: no {missing[0]}. speculators stores no K/V and they cannot be "
                "computed from hidden states. Either `from_speculators.py prompts` and extract_hf.py --given, or --kv DIR with "
                "the K/V of the same tokens, or make the files anew with vllm_connector.py")
        return {key: file.get_tensor(key) for key in keys}
    names = (f"hs_{row}.safetensors", f"sample_{row:06d}.safetensors")
    path = next((path for name in names if (path := pathlib.Path(args.kv, name)).exists()), None)
    if path is None:
        raise ExtractError(f"{args.kv}: neither {names[0]} nor {names[1]}, for row {row}")
    with open_file(path) as other:
        same_tokens(other, ids, path)
        missing = [key for key in keys if key not in other.keys()]
        if missing:
            raise ExtractError(f"{path}: no {missing[0]}")
        return {key: other.get_tensor(key) for key in keys}


def make_sample(args, row, ids, mask, text):
    """(tensors, which side of the norm, the stored type of K/V)."""
    path = args.hidden_states / f"hs_{row}.safetensors"
    with open_file(path) as file:
        same_tokens(file, ids, path)
        kv = kv_of(args, row, ids, file, text)
        tensors = {"token_ids": torch.tensor(ids, dtype=torch.int64), "loss_mask": torch.tensor(mask, dtype=torch.uint8), **kv}
        hidden = last_hidden(file, text, path)
        plain = hidden["hidden_states"].float() * hidden.get(SCALES, torch.ones(len(ids)))[:, None]
        check_sample(tensors | {"hidden_states": plain}, text, str(path))
        return tensors | hidden, norm_side(file, path), next(iter(kv.values())).dtype


def each_row(args, rows, work):
    """work(row, ids, mask) for every row with an hs file; says how it went. `work` returns False for what is there already."""
    counts, progress = {"made": 0, "there": 0, "without hidden states": 0, "bad": 0}, Progress(len(rows), "rows")
    for row in range(len(rows)):
        if not (args.hidden_states / f"hs_{row}.safetensors").exists():
            counts["without hidden states"] += 1
            continue
        try:
            ids, mask = read_row(rows, row, args.data)
            counts["made" if work(row, ids, mask) else "there"] += 1
        except ExtractError as error:
            if args.on_bad == "error":
                raise
            counts["bad"] += 1
            print(f"left out: {error}", file=sys.stderr)
            continue
        progress.step(row + 1, len(ids))
    if counts["without hidden states"] == len(rows):
        raise ExtractError(f"{args.hidden_states}: no hs_ROW.safetensors of the {len(rows)} rows; give --hidden-states DIR, or "
                           "use `from_speculators.py prompts`")
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def make_prompts(args, rows):
    def lines():
        for row in range(len(rows)):
            ids, mask = read_row(rows, row, args.data)
            yield json.dumps({"token_ids": ids, "loss_mask": mask}) + "\n"
    write_text(args.out, "".join(lines()))
    return f"{args.out}: {len(rows)} lines for extract_hf.py --given"


def make_samples(args, rows, text):
    folder = Folder(args.out, {"program": "from_speculators.py", "data": str(pathlib.Path(args.data).resolve()),
                               "hidden_states": str(args.hidden_states.resolve()), "kv": args.kv and str(pathlib.Path(args.kv).resolve()),
                               "verifier": args.name})

    def work(row, ids, mask):
        name = f"sample_{row:06d}.safetensors"
        folder.remove_remains(name)
        if (folder.path / name).exists():
            return False
        tensors, side, kv_dtype = make_sample(args, row, ids, mask, text)
        write_sample(folder.path / name, tensors, metadata(text, args.name, side, kv_dtype, made_by="from_speculators.py", row=row))
        return True
    return f"{args.out}: samples: {each_row(args, rows, work)}"


def make_sidecar(args, rows, text):
    lines = []

    def work(row, ids, mask):
        make_sample(args, row, ids, mask, text)
        lines.append(json.dumps({"file": f"hs_{row}.safetensors", "loss_mask": mask}) + "\n")
        return True
    said = each_row(args, rows, work)
    path = args.hidden_states / "loss_mask.jsonl"
    write_text(path, "".join(lines))
    return f"{path}: masks: {said}. The files have no label: give mtp --hidden-norm pre unless their metadata say hidden_norm"


def main():
    args = parse()
    rows = read_rows(args.data)
    if args.what == "prompts":
        print(make_prompts(args, rows))
        return 0
    args.name = args.name or pathlib.Path(args.verifier).resolve().name
    text = check_config(AutoConfig.from_pretrained(args.verifier), f"{args.verifier}/config.json")
    print((make_samples if args.what == "samples" else make_sidecar)(args, rows, text))
    return 0


if __name__ == "__main__":
    run_program(main)
