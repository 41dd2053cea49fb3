"""The examples as users run them: they hold, they notice where samples mix, and what the user can mend is one sentence.

Those of one test share a process that has imported transformers, TRL and PEFT once (``forked.py``).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT
from tests.docs import stand_ins
from tests.models.tiny_models import build

EXAMPLES = ROOT / "examples"
# A line of an example that compares two losses, or that says how small a difference is.
COMPARED = re.compile(r"^(.+?) +(\d+\.\d+) +(\d+\.\d+)   (same|DIFFERENT)$", re.MULTILINE)
SMALL = re.compile(r"^(.+?) +(\d\.\de[-+]\d\d) +(same|DIFFERENT)$", re.MULTILINE)
SETTINGS = dict(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")


def run_all(*commands):
    """Run ``name option ...`` of each command; returns (status, stdout, stderr) of each."""
    words = [command.split() for command in commands]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.forked"],
        input=json.dumps([[str(EXAMPLES / f"{name}.py"), *options] for name, *options in words]),
        env={**os.environ, **SETTINGS},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compared(text, count):
    found = [(claim, float(one), float(other), verdict) for claim, one, other, verdict in COMPARED.findall(text)]
    assert len(found) == count, text
    return found


def assert_same(text, count):
    for claim, one, other, verdict in compared(text, count):
        assert abs(one - other) < 1e-4 and one > 0.1 and verdict == "same", claim


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(f"A text of more than thirty-two characters, the number {number}" for number in range(9)))
    return path


def test_what_examples_show_holds(texts):
    demo = f"demo --steps 3 --batch 3 --max-length 20 --dataset {texts}"
    one_process = ("quickstart", "trainer", "trl_sft", "peft_lora", "plain_functions", "leak_report", demo)
    outcomes = run_all(*one_process, "sequence_parallel")
    for status, out, err in outcomes:
        assert status == 0, out + err
    quickstart, trainer, trl, peft, functions, report, demo, shards = (out for _, out, _ in outcomes)

    assert float(re.search(r"at most (\S+) from alone", quickstart)[1]) < 1e-5
    assert_same(trainer, 3)
    losses = [one for _, one, _, _ in compared(trainer, 3)]
    assert losses[2] < losses[0], "it was not trained"
    assert_same(trl, 6)
    assert_same(peft, 2)
    assert "in_proj_qkv" in peft.splitlines()[0]
    small = SMALL.findall(peft)
    assert len(small) == 2 and all(0 < float(difference) < 1e-4 for _, difference, _ in small), peft
    rows = functions.splitlines()[1:]
    assert len(rows) == 6 and all(re.search(r" 0\.0e\+00 +0\.0e\+00   equal$", row) for row in rows), functions
    stock, hooked = report.split("\n\nQwen3_5ForCausalLM", 2)
    assert "\nLeak: layers.0" in stock and "\nNo leak: " in hooked
    assert_same(shards, 3)
    summary = json.loads(demo.splitlines()[-1].removeprefix("DEMO "))
    assert summary["max_logit_difference_packed_vs_alone"] < 1e-4 and summary["loss_last"] < summary["loss_first"]
    assert {"causal_conv1d_fn", "chunk_gated_delta_rule"} <= set(summary["hooks"])


def test_samples_that_mix_are_noticed():
    """Stock transformers, told by positions alone: the same scripts find another loss packed than alone, and fail."""
    options = "--attn sdpa --positions"
    for (status, out, err), count in zip(
        run_all(*(f"{name} {options}" for name in ("trainer", "trl_sft", "peft_lora"))), (3, 6, 2)
    ):
        assert status == 1 and "Does not hold" in err, out + err
        for claim, one, other, verdict in compared(out, count):
            assert abs(one - other) > 1e-3 and verdict == "DIFFERENT", claim


def test_other_models(tmp_path):
    """Attention alone, state spaces, short convolutions; each from the folder of a saved model."""
    tokenizer = AutoTokenizer.from_pretrained(stand_ins.save_model(tmp_path / "words"))
    used = {"llama": "trainer", "mamba": "peft_lora", "bamba": "trainer", "lfm2": "peft_lora"}
    for model_type in used:
        build(model_type).save_pretrained(tmp_path / model_type)
        tokenizer.save_pretrained(tmp_path / model_type)
    commands = [f"{name} --model {tmp_path / model_type}" for model_type, name in used.items()]
    for command, (status, out, err) in zip(commands, run_all(*commands)):
        assert status == 0, command + out + err
        assert_same(out, 3 if command.startswith("trainer") else 2)


def test_what_the_user_can_mend_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        f"trainer --model {tmp_path}/nowhere": "there is no such folder",
        f"leak_report --model {tmp_path}/empty": "no config.json; give the folder that save_pretrained wrote",
        "peft_lora --model owner/nothing": "owner/nothing",
        "demo --steps 2": "--steps must be at least 3, got 2",
        f"demo --dataset {tmp_path}/none.txt": "no readable file or folder here",
        "sequence_parallel --attn sdpa": "its attention is 'sdpa', which sees this rank's tokens only",
    }
    for (command, sentence), (status, out, err) in zip(cases.items(), run_all(*cases)):
        assert status in (1, 2) and sentence in err and "Traceback" not in err, command + out + err


def test_a_clone_without_a_build_or_packages(tmp_path):
    """Nothing built: the commands that build are named; another Python than that of .venv: so is that one."""
    copy = Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    for options, name, sentence in (
        ([], "plain_functions", "run `make build`, or set LOCAL_KERNELS"),
        (["-S"], "trl_sft", "is missing: run it with .venv/bin/python"),
        (["-S"], "plain_functions", "torch is missing: run it with .venv/bin/python"),
    ):
        command = [sys.executable, *options, str(copy / f"{name}.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode in (1, 2) and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_demo_through_a_hub(texts):
    """The build is published to a Hub on the loopback interface and loaded from there."""
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--hub",
        "--steps",
        "3",
        "--batch",
        "2",
        "--dataset",
        str(texts),
    ]
    done = subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    address = re.search(r"A Hub inside this process: (http://127\.0\.0\.1:\d+)", done.stdout)[1]
    assert f"from {address}:" in done.stdout and "\nDEMO {" in done.stdout
