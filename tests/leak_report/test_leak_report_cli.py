"""The command line of ``leak_report``: on saved models, from a built variant's folder, by path and by ``python -m``."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.leak_report.test_leak_report import one_thread  # noqa: F401  an autouse fixture
from tests.models import head_models
from tests.models.tiny_models import VOCABULARY, build


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Model type, "llama classifier" being one with a head -> folder of a saved model."""
    known = {}

    def folder(model_type):
        if model_type not in known:
            known[model_type] = str(tmp_path_factory.mktemp(model_type))
            head = model_type.partition(" ")[2]
            model = head_models.build("llama", 0, "sdpa") if head else build(model_type, "eager")
            model.save_pretrained(known[model_type])
        return known[model_type]

    return folder


@pytest.fixture
def main(kernel):
    """``main`` of the command line in this process; the hooks are back in place afterwards."""
    yield importlib.import_module(f"{kernel.__name__}.leak_report.cli").main
    kernel.install_hooks()
    assert kernel.hooks_status().installed


def test_stock_by_default(main, saved, capsys, tmp_path):
    """One report for each of the collator's settings; what is refused is told and is no picture."""
    picture = tmp_path / "report.png"
    assert main([saved("qwen3_5_text"), "--lengths", "5,9,3", "--save", str(picture)]) == 1
    output = capsys.readouterr().out
    assert output.count("hooks off") == 3 and output.count("3 samples in 17 tokens") == 3
    assert "Leak: layers.0 (gated delta rule)" in output and output.count("Refused: Qwen3_5ForCausalLM") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report-position_ids.png"]


@pytest.mark.parametrize(
    "model_type, arguments, status",
    [
        ("llama", ["--attn", "sdpa"], 0),
        ("qwen3_5_text", ["--attn", "eager", "--hooks"], 0),
        ("qwen3_5_text", ["--settings", "cu_seq_lens", "seq_idx"], 3),
        ("zaya", ["--attn", "ours"], 3),
        ("llama classifier", ["--settings", "position_ids"], 1),
        ("llama classifier", ["--attn", "ours", "--settings", "position_ids"], 0),
        ("mamba", ["--settings", "seq_idx"], 1),
        ("xlm-roberta", ["--attn", "ours", "--settings", "seq_idx"], 1),
        ("xlm-roberta", ["--attn", "ours", "--settings", "seq_idx", "--position-ids-start", "2"], 0),
    ],
)
def test_exit_status(main, saved, capsys, model_type, arguments, status):
    assert main([saved(model_type), "--lengths", "5,9,1", *arguments]) == status
    output = capsys.readouterr().out
    assert {0: "No leak: ", 1: "because", 3: "Refused: "}[status] in output
    if model_type != "zaya":  # refused while it is loaded
        assert ("hooks on" in output) == ("ours" in arguments or "--hooks" in arguments)


def test_text(main, saved, capsys, tmp_path):
    """The lines of a file are the samples; empty ones are none."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    (tmp_path / "text").write_text("w5 w6 w7\n\nw9 w8 w7 w6\n")
    arguments = ["--text", str(tmp_path / "text"), "--tokenizer", str(tmp_path), "--settings", "position_ids"]
    assert main([saved("mamba"), *arguments]) == 1
    output = capsys.readouterr().out
    assert "2 samples in 7 tokens" in output and "3 (sample 1)" in output


@pytest.mark.parametrize("arguments", [["--lengths", "5,0"], ["--lengths", "5,x"], ["--settings", "labels"]])
def test_usage_errors(main, saved, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([saved("mamba"), *arguments])
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_one_sample_is_no_pack(main, saved, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([saved("mamba"), "--lengths", "5"])
    assert stopped.value.code == 2 and "two samples or more make a pack, got 1" in capsys.readouterr().err


def started(kernel, arguments, **environment):
    """Run ``python ARGUMENTS`` as a user does who has the built variant's folder and nothing else."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("LOCAL_KERNELS", "PACKFREE_DEBUG")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(kernel.__file__).anchor,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_started_by_path(kernel, saved):
    """``python FOLDER/leak_report``: this build serves the model, hooks and attention."""
    folder = Path(kernel.__file__).parent / "leak_report"
    done = started(kernel, [str(folder), saved("qwen3_5_text"), "--lengths", "5,9,1", "--attn", "ours"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("local/packfree-kernels attention, hooks on") == 3
    assert done.stdout.count("No leak: Qwen3_5ForCausalLM keeps the 3 samples apart") == 3


def test_started_by_module(kernel, saved, tmp_path):
    """``python -m leak_report`` with the variant on the path; ``-m NAME.leak_report`` where its folder is a NAME."""
    folder = Path(kernel.__file__).parent
    arguments = ["leak_report", saved("mamba"), "--lengths", "5,9", "--settings", "seq_idx"]
    done = started(kernel, ["-m", *arguments], PYTHONPATH=str(folder))
    assert done.returncode == 1, done.stderr
    assert "Leak: layers.0 (Mamba-1)" in done.stdout and "hooks off" in done.stdout
    # An error must not end with 1, which means a leak.
    done = started(kernel, ["-m", "leak_report", str(tmp_path / "nothing")], PYTHONPATH=str(folder))
    assert done.returncode == 2 and "Traceback" in done.stderr
    (tmp_path / "packfree_kernels").symlink_to(folder)
    done = started(kernel, ["-m", "packfree_kernels.leak_report", "--help"], PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and done.stdout.startswith("usage: leak_report"), done.stderr
