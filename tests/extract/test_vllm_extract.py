#!/usr/bin/env python3
"""Protects: vllm_extract.py around the engine: what it asks of vLLM, what it writes, going on after an interruption. The engine
is played by this test; tests/peers/vllm_extract.sh runs the real one.
"""
import json
import sys
import types

import torch
from safetensors.torch import save_file

from support import check, refused, run, run_test, write_jsonl

import vllm_extract
from of_sample import VERIFIER, prompts

asked = []
stop_after = None


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    """Continues a prompt with its own length, over and over; extraction writes a file with the ids and the mask."""

    def __init__(self, **settings):
        self.settings = settings

    def generate(self, texts, options, use_tqdm):
        if stop_after is not None and len(asked) >= stop_after:
            raise KeyboardInterrupt
        outputs = []
        for text, option in zip(texts, options):
            ids = text["prompt_token_ids"]
            asked.append((ids, option))
            if "kv_transfer_config" in self.settings:
                folder = self.settings["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"]
                params = option.extra_args["kv_transfer_params"]
                save_file({"token_ids": torch.tensor(ids), "loss_mask": torch.tensor(params["loss_mask"], dtype=torch.uint8)},
                          f"{folder}/{params['file']}")
            outputs.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[len(ids)] * option.max_tokens)]))
        return outputs


def interrupted(*arguments):
    try:
        run(vllm_extract.main, *arguments)
    except KeyboardInterrupt:
        return
    raise AssertionError("was not interrupted")


def generates(folder):
    global stop_after
    lines = write_jsonl(folder / "prompts.jsonl", [dict(line, max_new_tokens=3) for line in prompts(4)])
    texts = folder / "texts.jsonl"
    options = ("generate", "--verifier", VERIFIER, "--prompts", lines, "--texts", texts, "--batch", 1)
    stop_after = 2
    interrupted(*options)
    part = folder / "texts.jsonl.part"
    check(not texts.exists() and len(part.read_text().splitlines()) == 2, "two texts before the interruption")
    with open(part, "a", encoding="utf-8") as file:
        file.write('{"line": 2, "token_')
    stop_after = None
    refused(vllm_extract.main, *options, "--seed", 3, says=["texts.jsonl.settings", "seed was 0, is 3"])
    check("4 texts" in run(vllm_extract.main, *options), "goes on")
    made = [json.loads(line) for line in texts.read_text().splitlines()]
    want = [line["token_ids"] for line in prompts(4)]
    check([line["line"] for line in made] == [0, 1, 2, 3] and len(asked) == 4, "each line once")
    check(all(line["token_ids"] == ids + [len(ids)] * 3 and line["prompt_len"] == len(ids) for line, ids in zip(made, want)),
          "texts are prompts and continuations")
    check(len({option.seed for _, option in asked}) == 4, "a seed for each line")
    refused(vllm_extract.main, *options, says=["is there already"])
    return texts


def extracts(folder, texts):
    asked.clear()
    out = folder / "out"
    options = ("extract", "--verifier", VERIFIER, "--prompts", texts, "--out", out)
    check("4 written, 0 there" in run(vllm_extract.main, *options), "four samples")
    for (ids, option), ids_of_prompt in zip(asked, [line["token_ids"] for line in prompts(4)]):
        mask = option.extra_args["kv_transfer_params"]["loss_mask"]
        check(option.max_tokens == 1 and mask == [0] * len(ids_of_prompt) + [1] * 3 and len(mask) == len(ids), "mask of a text")
    (out / "sample_000002.safetensors").unlink()
    check("1 written, 3 there" in run(vllm_extract.main, *options), "goes on")
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    lines[1]["token_ids"][4] += 1
    changed = write_jsonl(folder / "changed.jsonl", lines)
    refused(vllm_extract.main, *(changed if option == texts else option for option in options),
            says=["changed.jsonl:2", "sample_000001"])
    wait = vllm_extract.wait_for
    try:
        wait([out / "none.safetensors"], seconds=0)
        check(False, "a sample that was not written goes unnoticed")
    except vllm_extract.ExtractError as error:
        check("1 samples were not written" in str(error), str(error))


def body(folder):
    sys.modules["vllm"] = types.SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams)
    extracts(folder, generates(folder))


if __name__ == "__main__":
    run_test("vllm_extract", body)
