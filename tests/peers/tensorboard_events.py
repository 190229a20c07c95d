#!/usr/bin/env python3
"""tensorboard_events.py RUN_DIR

The tensorboard package reads the event files of a run: every record intact, tags, steps and values those of
metrics.jsonl (as fp32, which is what an event holds), and nothing beside them.
"""
import json
import pathlib
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def as_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def numbers(record, prefix=""):
    """(tag, value) of every number of a metrics.jsonl line; lists by index, as the tags spell it."""
    for key, value in record.items():
        if key == "unix":  # an event has a time of its own
            continue
        tag = prefix + key
        if isinstance(value, bool) or value is None or isinstance(value, str):
            continue
        if isinstance(value, dict):
            yield from numbers(value, tag + "/")
        elif isinstance(value, list):
            yield from numbers({str(i): x for i, x in enumerate(value)}, tag + "/")
        else:
            yield tag, value


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run = pathlib.Path(sys.argv[1])
    files = sorted(run.rglob("events.out.tfevents.*"))
    if not files:
        sys.exit(f"{run}: no event file")
    events = {}
    for folder in sorted({file.parent for file in files}):
        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            for event in accumulator.Scalars(tag):
                events[tag, event.step] = event.value
    expected = {}
    with open(run / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            step = record.pop("step")
            expected.update({(tag, step): as_float32(value) for tag, value in numbers(record, record["kind"] + "/")})
    missing = sorted(set(expected) - set(events))
    extra = sorted(set(events) - set(expected))
    wrong = sorted(key for key in set(events) & set(expected) if events[key] != expected[key])
    print(f"{len(files)} event files, {len(events)} values, {len({tag for tag, _ in events})} tags")
    for name, keys in (("missing in the events", missing), ("not in metrics.jsonl", extra), ("different", wrong)):
        if keys:
            print(f"{name}: {len(keys)}, first {keys[0]}")
    sys.exit(bool(missing or extra or wrong or not events))


if __name__ == "__main__":
    main()
