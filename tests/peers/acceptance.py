#!/usr/bin/env python3
"""acceptance.py EVAL.json FIRST MEAN

Passes when EVAL.json (`mtp eval --json`) shows at least FIRST of the first drafts and MEAN drafts a round accepted.
"""
import json
import sys


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        rounds = json.load(file)["rounds"]
    first, mean = rounds["accepted"][0] / rounds["count"], rounds["mean_accepted"]
    print(f"{rounds['count']} rounds, first draft accepted {first:.4f} (wanted {sys.argv[2]}), "
          f"mean accepted {mean:.4f} (wanted {sys.argv[3]})")
    sys.exit(first < float(sys.argv[2]) or mean < float(sys.argv[3]))


if __name__ == "__main__":
    main()
