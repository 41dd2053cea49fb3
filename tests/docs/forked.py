"""Runs scripts one after the other, each as a process of its own that has the large imports already behind it.

As a program: takes command lines as JSON from its input, a list of lists of words, and prints a list of
``[status, stdout, stderr]``. A script starts as ``python SCRIPT`` starts it, but for the modules imported here.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import List, Tuple

Outcome = Tuple[int, str, str]


def run_all(commands: List[List[str]]) -> List[Outcome]:
    return [_run(command) for command in commands]


def _run(command: List[str]) -> Outcome:
    """Fork, run the script in the child, and read what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_script(command))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return status, texts[0], texts[1]


def _script(command: List[str]) -> int:
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import transformers
    import trl

    for module, names in (
        (transformers, ["AutoModelForCausalLM", "Trainer", "Qwen3_5ForCausalLM", "PreTrainedTokenizerFast"]),
        (trl, ["SFTTrainer"]),
    ):
        for name in names:
            getattr(module, name)
    print(json.dumps(run_all(json.load(sys.stdin))))
