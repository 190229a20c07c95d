"""What the tests of trainers/extract share. Each test is a program: it prints one line and exits 0 when all its checks hold.

    python tests/extract/test_NAME.py [--mtp PROGRAM]        PROGRAM: default $MTP, else build/mtp
"""
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXTRACT = ROOT / "trainers/extract"
SAMPLE = ROOT / "tests/data/sample"
sys.path.insert(0, str(EXTRACT))

num_checks = 0


def check(holds, says):
    global num_checks
    num_checks += 1
    if not holds:
        raise AssertionError(says)


def mtp_program():
    given = sys.argv[sys.argv.index("--mtp") + 1] if "--mtp" in sys.argv else os.environ.get("MTP", str(ROOT / "build/mtp"))
    program = pathlib.Path(given).resolve()
    if not program.is_file():
        sys.exit(f"no program {program}; build mtp, or give --mtp PROGRAM")
    return program


def mtp(*arguments):
    """Standard output of mtp; its exit status must be 0."""
    done = subprocess.run([mtp_program(), *map(str, arguments)], capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"mtp {' '.join(map(str, arguments))}: status {done.returncode}\n{done.stderr}")
    return done.stdout


def good(folder, verifier, *options):
    """mtp check on a folder: (good samples, tokens, supervised tokens). A bad sample fails."""
    says = mtp("check", folder, "--verifier", verifier, *options)
    found = re.search(r"(\d+) samples?, (\d+) good \((\d+) tokens, (\d+) of them supervised\), 0 bad", says)
    check(found is not None and found[1] == found[2], f"mtp check {folder}: {says}")
    return tuple(int(number) for number in found.groups()[1:])


def run(main, *arguments):
    """What a program of ours prints on standard output, run in this process."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [main.__module__, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            check(main() == 0, f"{main.__module__} {arguments}: failed")
    finally:
        sys.argv = argv
    return out.getvalue()


def refused(main, *arguments, says):
    """The program ends with an ExtractError whose message has all the texts of `says`."""
    from samples import ExtractError
    try:
        run(main, *arguments)
    except ExtractError as error:
        for text in says:
            check(text in str(error), f"message without \"{text}\": {error}")
        return
    raise AssertionError(f"{main.__module__} {arguments}: accepted, should be refused ({says})")


def write_jsonl(path, lines):
    pathlib.Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_json(path, value):
    pathlib.Path(path).write_text(json.dumps(value), encoding="utf-8")


def run_test(name, body):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mtp-extract-"))
    try:
        body(folder)
        print(f"{name}: {num_checks} checks")
    except AssertionError as error:
        sys.exit(f"{name}: FAILED: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
