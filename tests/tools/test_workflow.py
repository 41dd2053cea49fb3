"""The GitHub Actions workflow, as far as it can be checked without GitHub: form, and commands that exist here."""

import re

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
STEP_KEYS = {"name", "id", "if", "uses", "with", "run", "env", "shell", "working-directory", "timeout-minutes"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_form(path):
    workflow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key "on" as true.
    assert workflow["name"] and workflow[True] and workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] and job["timeout-minutes"], name
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS and ("run" in step) != ("uses" in step), step
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/checkout@v1")), step


def test_workflows_run_what_a_newcomer_runs():
    """Every make target that is named exists, and tests, checks and variants are all run."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [
        step.get("run", "")
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
    ]
    named = {target for step in steps for target in re.findall(r"^make ([a-z-]+)", step)}
    assert named <= targets and {"test", "check", "variants"} <= named
