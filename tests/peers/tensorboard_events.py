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


def per_step(tag, values):
    """Draft steps count from 1 in tags."""
    return {f"{tag}_{k}": value for k, value in enumerate(values or [], 1)}


def scalars(record):
    """{tag: value} that the events hold for a line of metrics.jsonl."""
    if record["kind"] == "train":
        tags = {name: record[name] for name in ("loss", "learning_rate", "grad_norm", "epoch")}
        tags["rows_per_second"] = record["time"]["rows_per_second"]
        tags.update(per_step("loss", record["step_loss"]), **per_step("centroid_loss", record["centroid_loss"]))
    else:
        tags = {"loss": record["weighted_loss"], "accepted_length": record["rounds"]["mean_accepted"],
                "accepted_length_positions": record["positions"]["mean_accepted"]}
        tags.update(per_step("acceptance", record["rounds"]["acceptance"]))
    tags.update(per_step("accuracy", record["accuracy"]), **per_step("centroid_miss", record["centroid_miss"]))
    return {f"{record['kind']}/{tag}": value for tag, value in tags.items()}


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
            expected.update({(tag, record["step"]): as_float32(value) for tag, value in scalars(record).items()})
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
