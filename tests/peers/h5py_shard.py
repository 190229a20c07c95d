#!/usr/bin/env python3
"""h5py_shard.py STORE SAMPLE_FOLDER    h5py opens the shards of a store and finds every field, attribute and unit named
                                     and explained; the values are those of the samples it was packed from (bf16)
"""
import pathlib
import sys

import h5py
import numpy
from safetensors.numpy import safe_open

FIELDS = ["token_ids", "loss_mask", "hidden_states", "kv_last_local", "kv_last_global"]
ATTRIBUTES = ["format", "version", "complete", "description", "verifier", "hidden_norm", "kv_encoding", "num_tokens",
              "num_samples", "num_supervised", "vocab_size", "hidden_size", "sliding_window", "num_kv_heads_local",
              "head_dim_local", "num_kv_heads_global", "head_dim_global"]


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def bits(path, key):
    """The 16-bit payload of a bf16 tensor, read without torch."""
    import json
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8: 8 + size])[key]
    assert entry["dtype"] == "BF16", (path, key, entry["dtype"])
    begin, end = entry["data_offsets"]
    return numpy.frombuffer(raw[8 + size + begin: 8 + size + end], "<u2").reshape(entry["shape"])


def check(path, folder):
    with h5py.File(path, "r") as file:
        for name in ATTRIBUTES:
            assert name in file.attrs, f"{path}: no attribute {name}"
        assert text(file.attrs["format"]) == "mtp-shard" and file.attrs["complete"] == 1
        for name in FIELDS + ["index", "checksums", "sources"]:
            assert name in file, f"{path}: no dataset {name}"
        for name, dataset in file.items():
            for key in ("description", "unit", "encoding"):
                assert text(dataset.attrs.get(key, "")), f"{path}: {name} has no {key}"
            assert dataset.chunks is None, f"{path}: {name} is not contiguous"
        names = bytes(file["sources"][:]).split(b"\0")[:-1]
        index = file["index"][:]
        assert len(index) == len(names) == file.attrs["num_samples"]
        for member in index.dtype.names:
            assert member in text(file["index"].attrs["description"]), f"{member} is not explained"
        for row, name in zip(index, names):
            sample = folder / name.decode()
            rows = slice(int(row["first_token"]), int(row["first_token"] + row["num_tokens"]))
            with safe_open(sample, "numpy") as tensors:
                assert (file["token_ids"][rows] == tensors.get_tensor("token_ids")).all(), sample
            assert file["loss_mask"][rows].sum() == row["num_supervised"], sample
            assert (file["hidden_states"][rows] == bits(sample, "hidden_states")).all(), sample
            only = "global_v_only" in file.attrs and file.attrs["global_v_only"] == 1
            for kind in ("local", "global"):
                for part, letter in enumerate("v" if only and kind == "global" else "kv"):
                    assert (file[f"kv_last_{kind}"][rows, part] == bits(sample, f"kv_last_{kind}_{letter}")).all(), sample
        return len(index)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    shards = sorted(pathlib.Path(sys.argv[1]).glob("shard-*.h5"))
    if not shards:
        sys.exit(f"{sys.argv[1]}: no shards")
    samples = sum(check(path, pathlib.Path(sys.argv[2])) for path in shards)
    print(f"{len(shards)} shards, {samples} samples: every field is named and explained, and holds the samples' values")


if __name__ == "__main__":
    main()
