#!/usr/bin/env python3
"""Protects: extract_hf.py. Its samples of the shipped verifier are the shipped samples and mtp takes them; going on after
kill -9; every form of a line.
"""
import json
import signal
import subprocess
import sys
import time

import torch
from safetensors.torch import load_file

from support import EXTRACT, SAMPLE, check, good, mtp, refused, run, run_test, write_jsonl

import extract_hf
from of_sample import FP32, VERIFIER, content, prompts, same, sample

COUNT = 3
CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def reproduces(folder):
    lines = write_jsonl(folder / "prompts.jsonl", prompts(COUNT))
    out = folder / "whole"
    run(extract_hf.main, "--verifier", VERIFIER, "--prompts", lines, "--out", out, "--ignore-eos", *FP32)
    for index in range(COUNT):
        same(sample(out, index), load_file(SAMPLE / f"train/sample_{index:04d}.safetensors"), f"sample {index}")
    check(good(out, VERIFIER)[0] == COUNT, "mtp check counts the samples")
    mtp("pack", folder / "packed", out, "--verifier", VERIFIER, "--max-bad", 0)
    says = json.loads(mtp("eval", "--model", SAMPLE / "drafter_reference", "--verifier", VERIFIER, "--data", out, "--json"))
    check(says["rounds"]["mean_accepted"] > 0.2, f"mtp eval on the samples: {says['rounds']}")
    return lines, out


def resumes(folder, lines, whole):
    """kill -9 once a file is there; what the second run adds makes the folder that of a run without a stop."""
    out = folder / "killed"
    command = [sys.executable, EXTRACT / "extract_hf.py", "--verifier", VERIFIER, "--prompts", lines, "--out", out, "--ignore-eos",
               "--threads", "1", *FP32]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        while program.poll() is None and not list(out.glob("*.safetensors")):
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
    there = len(list(out.glob("*.safetensors")))
    check(1 <= there < COUNT, f"killed after {there} of {COUNT} samples; nothing is left to go on with")
    (out / ".sample_000002.safetensors.1.tmp").write_bytes(b"half")
    says = run(extract_hf.main, *command[2:])
    check(f"{COUNT - there} written, {there} there" in says, says)
    check(not list(out.glob(".*.tmp")), "temporary files are left")
    for path in whole.glob("*.safetensors"):
        check(content(path) == content(out / path.name), f"{path.name} differs from that of a run without a stop")
    refused(extract_hf.main, *command[2:], "--seed", 5, says=["extraction.json", "seed was 0, is 5"])
    changed = prompts(COUNT)
    changed[1]["token_ids"][3] = 77
    write_jsonl(folder / "changed.jsonl", changed)
    refused(extract_hf.main, *(folder / "changed.jsonl" if part == lines else part for part in command[2:]),
            says=["changed.jsonl:2", "sample_000001"])


def forms(folder, whole):
    """Given text of each form is the same forward pass; the chat template; text."""
    made = sample(whole, 0)
    ids, mask = made["token_ids"].tolist(), made["loss_mask"].tolist()
    length = mask.index(1)
    tokenizer = extract_hf.transformers.AutoTokenizer.from_pretrained(VERIFIER)
    template = folder / "chat.jinja"
    template.write_text(CHAT, encoding="utf-8")
    talk = [{"role": "user", "content": "what is a hack?"}, {"role": "assistant", "content": "a quick job."}]
    given = write_jsonl(folder / "given.jsonl", [
        {"token_ids": ids, "loss_mask": mask}, {"token_ids": ids, "prompt_len": length},
        {"token_ids": ids[:length], "continuation": ids[length:]}, {"messages": talk},
        {"prompt": "a hacker is", "continuation": " a person", "note": "passed over"}])
    out = folder / "given"
    run(extract_hf.main, "--verifier", VERIFIER, "--prompts", given, "--out", out, "--given", "--chat-template", template, *FP32)
    for index in range(3):
        same(sample(out, index), made, f"given, form {index}")
    chat = sample(out, 3)
    head = [2] + tokenizer("<user> what is a hack?\n<assistant>", add_special_tokens=False)["input_ids"]
    whole_ids = [2] + tokenizer("<user> what is a hack?\n<assistant> a quick job.\n", add_special_tokens=False)["input_ids"]
    check(chat["token_ids"].tolist() == whole_ids, "chat template: other ids")
    check(chat["loss_mask"].tolist() == [0] * len(head) + [1] * (len(whole_ids) - len(head)), "chat template: other mask")
    text = sample(out, 4)
    check(tokenizer.decode(text["token_ids"][1:]) == "a hacker is a person" and text["token_ids"][0] == 2, "text: other ids")
    on_policy = write_jsonl(folder / "talk.jsonl", [{"messages": talk}, {"messages": talk[:1]}])
    run(extract_hf.main, "--verifier", VERIFIER, "--prompts", on_policy, "--out", folder / "talk", "--regenerate",
        "--max-new-tokens", 5, "--chat-template", template, *FP32)
    first, second = sample(folder / "talk", 0), sample(folder / "talk", 1)
    check(first["token_ids"].tolist()[: len(head)] == head and int(first["loss_mask"].sum()) in range(1, 6), "regenerated turn")
    check(torch.equal(first["token_ids"], second["token_ids"]), "the turn written anew has another prompt")
    refused(extract_hf.main, "--verifier", VERIFIER, "--prompts", on_policy, "--out", folder / "no1", "--chat-template", template,
            says=["talk.jsonl:1", "--regenerate"])
    refused(extract_hf.main, "--verifier", VERIFIER, "--prompts", on_policy, "--out", folder / "no2", "--regenerate",
            says=["no chat template"])


def body(folder):
    torch.set_num_threads(1)
    lines, whole = reproduces(folder)
    resumes(folder, lines, whole)
    forms(folder, whole)


if __name__ == "__main__":
    run_test("extract_hf", body)
