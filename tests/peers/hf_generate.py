#!/usr/bin/env python3
"""hf_generate.py DRAFTER VERIFIER PROMPTS.jsonl EVAL.json [--skip N] [--num-prompts N]

Assisted generation of real transformers in fp32 with an exported drafter, on the prompts of samples. Passes when each
text is that of plain greedy decoding and the mean number of accepted drafts a round is within 0.01 of EVAL.json, which
`mtp eval --position-offset 1 --json` wrote for the same samples.

transformers drafts at position t + 1 and leaves K/V of rejected drafts in what the drafter reads. mtp eval measures the
drafter without them, so they are cut here before each round, and the sliding K/V to the window. Rounds count as `mtp eval`
counts them: those with all K drafts (transformers drafts fewer next to the end of the text; the first forward pass over
the prompt drafts nothing).
"""
import argparse
import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

TOLERANCE = 0.01


class Rounds:
    """Wraps the candidate generator of transformers and keeps (drafted, accepted) of each round."""

    def __init__(self, window):
        self.window, self.rounds, self.drafted = window, [], 0
        self.get_candidates, self.update = Generator.get_candidates, Generator.update_candidate_strategy
        rounds = self
        Generator.get_candidates = lambda generator, *args, **kwargs: rounds.draft(generator, *args, **kwargs)
        Generator.update_candidate_strategy = lambda generator, ids, scores, accepted: rounds.verified(int(accepted))

    def draft(self, generator, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs):
        if not is_first_iteration:
            drafted, accepted = self.last
            shared = model_outputs.shared_kv_states
            for kind in list(shared.keys()):
                key, value = (x[:, :, : x.shape[2] - (drafted - accepted)] for x in shared[kind])
                if kind == "sliding_attention":
                    key, value = key[:, :, -self.window:], value[:, :, -self.window:]
                shared[kind] = (key, value)
        ids, logits = self.get_candidates(generator, input_ids, model_kwargs=model_kwargs, model_outputs=model_outputs,
                                          is_first_iteration=is_first_iteration, n_last_matches=n_last_matches, **kwargs)
        self.drafted = ids.shape[1] - input_ids.shape[1]
        return ids, logits

    def verified(self, accepted):
        self.last = (self.drafted, accepted)
        if self.drafted:
            self.rounds.append(self.last)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter")
    parser.add_argument("verifier")
    parser.add_argument("prompts")
    parser.add_argument("eval")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--num-prompts", type=int)
    args = parser.parse_args()
    with open(args.eval, encoding="utf-8") as file:
        ours = json.load(file)["rounds"]
    num_steps = len(ours["accepted"])
    with open(args.prompts, encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    prompts = prompts[args.skip:][: args.num_prompts]
    torch.set_num_threads(1)

    target = AutoModelForCausalLM.from_pretrained(args.verifier, dtype=torch.float32).eval()
    drafter = AutoModelForCausalLM.from_pretrained(args.drafter, dtype=torch.float32).eval()
    drafter.generation_config.num_assistant_tokens = num_steps
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0.0
    rounds = Rounds(drafter.config.text_config.sliding_window)
    same = 0
    for prompt in prompts:
        ids = torch.tensor([prompt["prompt_ids"]])
        options = {"max_new_tokens": prompt["total_len"] - ids.shape[1], "do_sample": False}
        plain = target.generate(ids, **options)
        same += torch.equal(plain, target.generate(ids, assistant_model=drafter, **options))
    full = [accepted for drafted, accepted in rounds.rounds if drafted == num_steps]
    mean = sum(full) / len(full)
    positions = " ".join(f"{sum(a > k for a in full) / len(full):.3f}" for k in range(num_steps))
    print(f"transformers: {same} of {len(prompts)} texts are those of plain greedy decoding; {len(full)} rounds, "
          f"mean accepted {mean:.4f}, per position {positions}")
    theirs = " ".join(f"{a / ours['count']:.3f}" for a in ours["accepted"])
    print(f"mtp eval:     {ours['count']} rounds, mean accepted {ours['mean_accepted']:.4f}, per position {theirs}")
    sys.exit(same != len(prompts) or abs(mean - ours["mean_accepted"]) > TOLERANCE)


if __name__ == "__main__":
    main()
