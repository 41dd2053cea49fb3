"""What foreign_tests.py loads into pytest: this package in one of three modes, and a line of JSON per test.

``PACKFREE_FOREIGN_MODE`` is ``without``, ``hooks`` (the package is loaded, models choose their attention as ever) or
``attention`` (ours is what a model gets that was asked for none). ``PACKFREE_FOREIGN_RESULTS`` names the file of lines.
"""

import fnmatch
import functools
import json
import os
import random
import signal
import sys

import pytest
import torch

REPO_ID = "org/packfree-kernels"
MODE = os.environ.get("PACKFREE_FOREIGN_MODE", "without")
SECONDS_A_TEST = int(os.environ.get("PACKFREE_FOREIGN_SECONDS", "120"))


def pytest_configure(config):
    torch.set_num_threads(1)
    if MODE == "without":
        return
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=1)
    if MODE == "attention":
        import transformers.modeling_utils as modeling_utils

        choose_ours(modeling_utils.PreTrainedModel, tuple(kernel.hooks_status().refused_models))


def choose_ours(base, refused):
    """Make our attention the default of every model class that it can serve."""
    stock = base._check_and_adjust_attn_implementation

    @functools.wraps(stock)
    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        if attn_implementation is None and can_serve(self, refused):
            attn_implementation, kwargs = REPO_ID, {**kwargs, "allow_all_kernels": True}
        return stock(self, attn_implementation, *args, **kwargs)

    base._check_and_adjust_attn_implementation = _check_and_adjust_attn_implementation


def can_serve(model, refused):
    if any(fnmatch.fnmatchcase(getattr(model.config, "model_type", ""), pattern) for pattern in refused):
        return False
    return bool(model._supports_flash_attn) and type(model)._can_set_attn_implementation()


# ---- the same numbers in every mode ----


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    random.seed(0)
    torch.manual_seed(0)
    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "global_rng", None), random.Random):
            module.global_rng.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that hangs in one mode is a failure of that mode, and not the end of the run."""

    def out_of_time(*_):
        raise TimeoutError(f"the test takes more than {SECONDS_A_TEST} s")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS_A_TEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- results ----

_outcomes = {}


def pytest_runtest_logreport(report):
    worst = _outcomes.setdefault(
        report.nodeid, {"test": report.nodeid, "outcome": "passed", "error": "", "seconds": 0.0}
    )
    worst["seconds"] += report.duration
    if report.outcome != "passed" and worst["outcome"] == "passed":
        worst["outcome"] = report.outcome
        worst["error"] = last_line(report) if report.outcome == "failed" else ""
    if report.when == "teardown":
        write(_outcomes.pop(report.nodeid))


def pytest_collectreport(report):
    if report.failed:
        write({"test": report.nodeid, "outcome": "failed", "error": last_line(report), "seconds": 0.0})


def last_line(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.strip().splitlines() if line.strip()] or [""]
    return (lines[0] if crash is not None else lines[-1])[:300]


def write(result):
    with open(os.environ["PACKFREE_FOREIGN_RESULTS"], "a", encoding="utf-8") as results:
        results.write(json.dumps(result) + "\n")
