#!/usr/bin/env python3
"""Protects: from_speculators.py. The Arrow data are made by datasets (by speculators' own preprocessing where it is installed),
the fp8 files by hs-connectors, and what comes out equals the shipped samples and is taken by mtp.

Needs datasets and hs-connectors beside the peers' environment.
"""
import json
import shutil
import sys

import torch
from datasets import Dataset, disable_progress_bars
from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor, quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support import SAMPLE, check, good, mtp, refused, run, run_test

import extract_hf
import from_speculators
from of_sample import FP32, VERIFIER, same

try:
    from speculators.data_generation import preprocessing
except ImportError as error:
    preprocessing, WHY = None, str(error)

COUNT = 4
KV = [f"kv_last_{kind}_{part}" for kind in ("local", "global") for part in "kv"]


def raw(row):
    return load_file(SAMPLE / f"raw/sample_{row:04d}.safetensors")


def trained(row):
    return load_file(SAMPLE / f"train/sample_{row:04d}.safetensors")


def arrow(folder):
    """The data set of rows 0 to 3 as speculators prepares it."""
    rows = Dataset.from_dict({"input_ids": [trained(row)["token_ids"].tolist() for row in range(COUNT)],
                              "loss_mask": [trained(row)["loss_mask"].tolist() for row in range(COUNT)]})
    if preprocessing:
        made = preprocessing.build_speculator_training_dataset(rows, extract_hf.transformers.AutoTokenizer.from_pretrained(VERIFIER),
                                                  max_length=1024, num_proc=1)
    else:
        rows = rows.add_column("seq_len", [len(ids) for ids in rows["input_ids"]])
        made = rows.with_format("torch")
    made.save_to_disk(folder)


def write_files(folder, kv=False, fp8=False, rows=range(COUNT)):
    """hs_ROW.safetensors: two layers, the first of which must not be looked at."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    for row in rows:
        sample = raw(row)
        hidden = sample["hidden_states"]
        both = torch.stack([torch.randn_like(hidden), hidden], dim=1)
        tensors = {"token_ids": sample["token_ids"], "hidden_states": both}
        if fp8:
            tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(both)
        save_file(tensors | ({key: sample[key] for key in KV} if kv else {}), folder / f"hs_{row}.safetensors")


def label(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def with_their_kv(folder, data):
    """K/V in the hs files: the samples are the raw ones with masks."""
    write_files(folder / "kv", kv=True, rows=(0, 1, 3))
    out = folder / "samples"
    options = ("samples", data, "--hidden-states", folder / "kv", "--verifier", VERIFIER, "--out", out)
    check("3 made, 0 there, 1 without hidden states, 0 bad" in run(from_speculators.main, *options), "counts of samples")
    for row in (0, 1, 3):
        path = out / f"sample_{row:06d}.safetensors"
        made, want = load_file(path), raw(row) | {"loss_mask": trained(row)["loss_mask"]}
        check(made.keys() == want.keys() and all(torch.equal(made[key], want[key]) for key in want), f"row {row} differs")
        check(label(path)["hidden_norm"] == "pre" and label(path)["format"] == "mtp-sample-1", f"label of row {row}")
    (out / "sample_000001.safetensors").unlink()
    check("1 made, 2 there" in run(from_speculators.main, *options), "goes on where it stopped")
    check(good(out, VERIFIER)[0] == 3, "mtp check on samples")
    run(from_speculators.main, "sidecar", data, "--hidden-states", folder / "kv", "--verifier", VERIFIER)
    supervised = sum(int(trained(row)["loss_mask"].sum()) for row in (0, 1, 3))
    count, _, masked = good(folder / "kv", VERIFIER, "--hidden-norm", "pre")
    check((count, masked) == (3, supervised), f"mtp check on the sidecar: {count} samples, {masked} supervised tokens")


def with_fp8(folder, data):
    """fp8 hidden states from hs-connectors, K/V from another extraction of the same tokens."""
    write_files(folder / "fp8", fp8=True)
    out = folder / "joined"
    kv = folder / "extracted"
    kv.mkdir()
    for row in range(COUNT):
        shutil.copy(SAMPLE / f"train/sample_{row:04d}.safetensors", kv / f"sample_{row:06d}.safetensors")
    run(from_speculators.main, "samples", data, "--hidden-states", folder / "fp8", "--kv", kv, "--verifier", VERIFIER, "--out", out)
    theirs = FP8Transfer(folder / "fp8", torch.float32)
    for row in range(COUNT):
        made = load_file(out / f"sample_{row:06d}.safetensors")
        ours = dequantize_fp8_tensor(made["hidden_states"], made[SCALES_KEY][:, None], torch.float32)
        check(torch.equal(ours, theirs.get_cached(row)["hidden_states"][:, -1]), f"row {row}: fp8 values differ")
        check(all(torch.equal(made[key], trained(row)[key]) for key in KV), f"row {row}: K/V of --kv differ")
    check(good(out, VERIFIER)[0] == 4, "mtp check on fp8 samples")
    says = json.loads(mtp("eval", "--model", SAMPLE / "drafter_reference", "--verifier", VERIFIER, "--data", out, "--json"))
    check(says["rounds"]["mean_accepted"] > 0.2, f"mtp eval on fp8 samples: {says['rounds']}")


def without_kv(folder, data):
    """Without K/V the rows are prompts for extract_hf.py, which makes the shipped samples of them."""
    write_files(folder / "hs")
    lines = folder / "given.jsonl"
    run(from_speculators.main, "prompts", data, "--out", lines)
    out = folder / "given"
    run(extract_hf.main, "--verifier", VERIFIER, "--prompts", lines, "--given", "--out", out, *FP32)
    for row in range(COUNT):
        same(load_file(out / f"sample_{row:06d}.safetensors"), trained(row), f"prompts, row {row}")
    refused(from_speculators.main, "samples", data, "--hidden-states", folder / "hs", "--verifier", VERIFIER, "--out",
            folder / "none", says=["hs_0.safetensors", "stores no K/V", "extract_hf.py --given", "--kv"])
    refused(from_speculators.main, "sidecar", data, "--hidden-states", folder / "hs", "--verifier", VERIFIER,
            says=["hs_0.safetensors", "stores no K/V"])


def refusals(folder, data):
    refused(from_speculators.main, "prompts", folder, "--out", folder / "x", says=["no data set on disk"])
    other = folder / "columns"
    Dataset.from_dict({"input_ids": [[2, 3]], "text": ["x"]}).save_to_disk(other)
    refused(from_speculators.main, "prompts", other, "--out", folder / "x", says=["loss_mask, seq_len missing"])
    skewed = folder / "skewed"
    Dataset.from_dict({"input_ids": [[2, 3]], "loss_mask": [[1]], "seq_len": [2]}).save_to_disk(skewed)
    refused(from_speculators.main, "prompts", skewed, "--out", folder / "x", says=["row 0", "2 input_ids, 1 entries"])

    def attempt(name, change, says):
        files = folder / name
        write_files(files, kv=True, rows=(0,))
        change(files / "hs_0.safetensors")
        options = ("samples", data, "--hidden-states", files, "--verifier", VERIFIER)
        refused(from_speculators.main, *options, "--out", folder / f"{name}-out", says=["hs_0.safetensors", *says])
        check("1 bad" in run(from_speculators.main, *options, "--out", folder / f"{name}-skip", "--on-bad", "skip"), f"{name}: skip")

    def edit(path, **tensors):
        save_file(load_file(path) | tensors, path)
    ids = raw(0)["token_ids"].clone()
    ids[7] += 1
    attempt("tokens", lambda path: edit(path, token_ids=ids), ["first difference at token 7"])
    attempt("other-row", lambda path: edit(path, token_ids=raw(1)["token_ids"]), ["token_ids are not those of the row"])
    attempt("width", lambda path: edit(path, hidden_states=torch.zeros(len(ids), 2, 64)), ["hidden_size is 128"])
    attempt("nan", lambda path: edit(path, kv_last_local_k=raw(0)["kv_last_local_k"] * float("nan")), ["kv_last_local_k has NaN"])
    attempt("scales", lambda path: edit(path, hidden_states=quantize_tensor_to_fp8(raw(0)["hidden_states"])[0]), ["is missing"])
    attempt("cut", lambda path: path.write_bytes(path.read_bytes()[:-100]), ["cannot be read"])


def body(folder):
    torch.set_num_threads(1)
    disable_progress_bars()
    data = folder / "data"
    arrow(data)
    with_their_kv(folder, data)
    with_fp8(folder, data)
    without_kv(folder, data)
    refusals(folder, data)
    if not preprocessing:
        print(f"Arrow data by datasets alone, speculators cannot be imported: {WHY}", file=sys.stderr)


if __name__ == "__main__":
    run_test("from_speculators", body)
