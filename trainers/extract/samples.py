"""What the extraction programs share: which layers K/V come from, the sample file, settings of an output folder.

A sample is one safetensors file (lib/data/README.md is its specification):
  token_ids          i64 [S]
  hidden_states      [S, Hb]
  kv_last_local_k/v  [S, NKV, D]     K after its norm and RoPE, V after its norm, of the last sliding layer that owns K/V
  kv_last_global_k/v [S, NKV, D]     the same for the last full-attention layer
  loss_mask          u8 [S]          1: this token may be a target
"""
import fcntl
import json
import os
import pathlib
import sys
import time

import torch
from safetensors.torch import save_file

FORMAT = "mtp-sample-1"
KINDS = {"local": "sliding_attention", "global": "full_attention"}
TEXT_MODELS = ("gemma4_text", "gemma4_unified_text")
MODELS = (*TEXT_MODELS, "gemma4", "gemma4_unified")


class ExtractError(Exception):
    """Something the user can mend; the message says what, where and how."""


def check_config(config, where):
    """The text config of a Gemma-4 verifier; an ExtractError for every other model."""
    if config.model_type not in MODELS:
        hint = " (a drafter; give its verifier)" if "assistant" in config.model_type else ""
        raise ExtractError(f"{where}: model_type is \"{config.model_type}\"{hint}; a Gemma-4 verifier has one of "
                           f"{', '.join(MODELS)}")
    text = config.get_text_config()
    if text.model_type not in TEXT_MODELS:
        raise ExtractError(f"{where}: text_config.model_type is \"{text.model_type}\"; expected one of "
                           f"{', '.join(TEXT_MODELS)}")
    if getattr(text, "use_bidirectional_attention", None) == "all":
        raise ExtractError(f"{where}: use_bidirectional_attention is \"all\": an encoder, it cannot verify drafts")
    kv_layers(text)
    return text


def kv_layers(text):
    """{"local": index, "global": index} of the last layer of each type that owns K/V. A layer among the last
    num_kv_shared_layers owns none. A type without a layer is left out."""
    num_owners = len(text.layer_types) - (getattr(text, "num_kv_shared_layers", None) or 0)
    unknown = set(text.layer_types) - set(KINDS.values())
    if unknown:
        raise ExtractError(f"layer_types has {sorted(unknown)}; only {', '.join(KINDS.values())} are known")
    found = {}
    for kind, layer_type in KINDS.items():
        if layer_type not in text.layer_types:
            continue
        owners = [i for i in range(num_owners) if text.layer_types[i] == layer_type]
        if not owners:
            raise ExtractError(f"num_kv_shared_layers is {text.num_kv_shared_layers}: no {layer_type} layer owns K/V")
        found[kind] = owners[-1]
    return found


def kv_shape(text, kind):
    """(NKV, D) of the K/V of a kind."""
    layer = kv_layers(text)[kind]
    # from transformers 5.2x on each layer has a config of its own, before that the widths of full layers were apart
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer is not None:
        return per_layer[layer].num_key_value_heads, per_layer[layer].head_dim
    if kind == "local":
        return text.num_key_value_heads, text.head_dim
    heads = getattr(text, "num_global_key_value_heads", None) if getattr(text, "attention_k_eq_v", False) else None
    return heads or text.num_key_value_heads, getattr(text, "global_head_dim", None) or text.head_dim


def metadata(text, verifier, hidden_norm, dtype, **more):
    """The metadata of a sample file. All values are strings. hidden_norm: "pre" or "post" the final norm."""
    assert hidden_norm in ("pre", "post")
    fixed = {"format": FORMAT, "verifier": str(verifier), "hidden_norm": hidden_norm, "rope_position": "token index",
             "kv_dtype": str(dtype).removeprefix("torch."), "window": str(text.sliding_window)}
    return fixed | {key: str(value) for key, value in more.items()}


def check_sample(tensors, text, name):
    """Shapes against the verifier, equal lengths, ids inside the vocabulary, no NaN or Inf: what must never be stored."""
    num_tokens = len(tensors["token_ids"])
    want = {"token_ids": (num_tokens,), "hidden_states": (num_tokens, text.hidden_size)}
    for kind in kv_layers(text):
        for part in "kv":
            want[f"kv_last_{kind}_{part}"] = (num_tokens, *kv_shape(text, kind))
    if "loss_mask" in tensors:
        want["loss_mask"] = (num_tokens,)
    if set(want) != set(tensors):
        raise ExtractError(f"{name}: keys {sorted(tensors)}; the verifier's samples have {sorted(want)}")
    for key, shape in want.items():
        tensor = tensors[key]
        if tuple(tensor.shape) != shape:
            raise ExtractError(f"{name}: {key} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            row = int((~torch.isfinite(tensor.flatten(1)).all(1)).nonzero()[0])
            raise ExtractError(f"{name}: {key} has NaN or Inf, first at token {row}; try --dtype float32")
    ids = tensors["token_ids"]
    if num_tokens == 0 or ids.min() < 0 or ids.max() >= text.vocab_size:
        raise ExtractError(f"{name}: token ids must be 0 to {text.vocab_size - 1}, at least one")


def sync_folder(folder):
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path, write):
    """write(temporary name), then sync and rename: `path` is either not there or whole. The temporary name ends in .tmp,
    which no reader of samples looks at."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path, text):
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_sample(path, tensors, header):
    write_whole(path, lambda temporary: save_file({key: value.contiguous() for key, value in tensors.items()}, temporary,
                                                  metadata=header))


def read_jsonl(path):
    """Yields (line number from 1, object). Empty lines are passed over but counted."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ExtractError(f"{path}:{number}: no JSON: {error}") from None
            if not isinstance(value, dict):
                raise ExtractError(f"{path}:{number}: expected an object {{…}}")
            yield number, value


def keep_settings(record, settings):
    """Writes the settings of an extraction beside its results, or refuses others than those that are there."""
    if not record.exists():
        write_text(record, json.dumps(settings, indent=1, sort_keys=True) + "\n")
        return
    try:
        old = json.loads(record.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ExtractError(f"{record}: no JSON ({error}); give another name for the results") from None
    differ = [key for key in sorted(old.keys() | settings.keys()) if old.get(key) != settings.get(key)]
    if differ:
        says = "; ".join(f"{key} was {old.get(key)!r}, is {settings.get(key)!r}" for key in differ)
        raise ExtractError(f"{record}: was begun with other settings: {says}. Give another name for the results")


def cut_half_line(path):
    """Takes away what an interrupted run left behind the last whole line."""
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class Folder:
    """An output folder: one program at a time (per `part`), one set of settings, whole files only."""

    def __init__(self, path, settings, part="all"):
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / f".extract-{part}.lock", "w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ExtractError(f"{self.path}: another extraction writes here (part {part}); wait for it, or give another "
                               "folder") from None
        record = self.path / "extraction.json"
        if not record.exists() and any(self.path.glob("*.safetensors")):
            raise ExtractError(f"{self.path}: has samples but no extraction.json; give an empty folder")
        keep_settings(record, settings)

    def remove_remains(self, name):
        """Temporary files of `name` that an interrupted run left. Only under the lock is nobody writing them."""
        for path in self.path.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)


class Progress:
    """A line on stderr now and then: on a terminal it is written over, in a log one every `seconds`."""

    def __init__(self, total, unit="samples"):
        self.total, self.unit, self.begin, self.tokens, self.made = total, unit, time.monotonic(), 0, 0
        self.live = sys.stderr.isatty()
        self.seconds, self.last = (0.2 if self.live else 10.0), 0.0

    def step(self, done, tokens=0):
        self.tokens += tokens
        self.made += 1
        now = time.monotonic()
        if now - self.last < self.seconds and done < self.total:
            return
        self.last, spent = now, max(now - self.begin, 1e-9)
        left = (self.total - done) * spent / self.made
        line = f"{done}/{self.total} {self.unit}, {self.tokens / spent:.0f} tokens/s, {left:.0f} s left"
        print(f"\r\033[K{line}" if self.live else line, end="" if self.live and done < self.total else "\n",
              file=sys.stderr, flush=True)


def run_program(main):
    """Runs main(); errors print once. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        sys.exit(main())
    except ExtractError as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
