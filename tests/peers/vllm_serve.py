#!/usr/bin/env python3
"""vllm_serve.py DRAFTER VERIFIER SAMPLE_DIR EVAL.json

vLLM (on a CPU, fp32, greedy) serves the verifier with an exported drafter on the prompts of samples. Passes when each
text is that of the sample (vLLM without a drafter wrote the same) and the accepted counts per position are exactly those
of EVAL.json, which `mtp eval --position-offset 0 --json` wrote for SAMPLE_DIR.

A step of the engine is a round: the tokens it adds are the accepted drafts and one more. Rounds count as `mtp eval` counts
them: as long as all K drafts lie inside the text, so vLLM writes K + 1 tokens beyond it.
"""
import glob
import json
import os
import sys

for variable, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1"), ("VLLM_LOGGING_LEVEL", "WARNING"),
                        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
    os.environ.setdefault(variable, value)

from safetensors import safe_open
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer


def read_sample(path):
    """(token ids, prompt length)."""
    with safe_open(path, "pt") as file:
        mask = file.get_tensor("loss_mask").tolist()
        return file.get_tensor("token_ids").tolist(), mask.index(1)


def serve(engine, name, prompt, num_tokens):
    """Numbers of tokens that the engine's steps added, and the text."""
    engine.add_request(name, {"prompt_token_ids": prompt},
                       SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True,
                                      output_kind=RequestOutputKind.DELTA))
    sizes, text = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = list(output.outputs[0].token_ids)
            if new:
                sizes.append(len(new))
                text += new
    return sizes, text


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    drafter, verifier, folder, eval_path = sys.argv[1:]
    with open(eval_path, encoding="utf-8") as file:
        ours = json.load(file)["rounds"]
    num_steps = len(ours["accepted"])
    # vLLM captures CUDA graphs for the centroid head unconditionally; without them it takes its eager path
    Gemma4Proposer._setup_centroids_cuda_graphs = lambda self: None
    llm = LLM(model=verifier, enforce_eager=True, max_model_len=512, dtype="float32", max_num_seqs=1,
              enable_prefix_caching=False,
              speculative_config={"method": "mtp", "model": drafter, "num_speculative_tokens": num_steps})
    rounds, same, samples = [], 0, sorted(glob.glob(os.path.join(folder, "*.safetensors")))
    for path in samples:
        tokens, prompt_len = read_sample(path)
        sizes, text = serve(llm.llm_engine, path, tokens[:prompt_len], len(tokens) - prompt_len + num_steps + 1)
        same += text[: len(tokens) - prompt_len] == tokens[prompt_len:]
        t = prompt_len - 1
        for size in sizes[1:]:  # the first step is the prompt's and drafts nothing
            if t + 1 + num_steps < len(tokens):
                rounds.append(size - 1)
            t += size
    accepted = [sum(a > k for a in rounds) for k in range(num_steps)]
    print(f"vLLM:     {same} of {len(samples)} texts are the samples'; {len(rounds)} rounds, accepted {accepted}, "
          f"mean {sum(rounds) / max(1, len(rounds)):.4f}")
    print(f"mtp eval: {ours['count']} rounds, accepted {ours['accepted']}, mean {ours['mean_accepted']:.4f}")
    sys.stdout.flush()
    # the engine's own shutdown may hang without a GPU
    os._exit(not (same == len(samples) and len(rounds) == ours["count"] and accepted == ours["accepted"]))


if __name__ == "__main__":
    main()
