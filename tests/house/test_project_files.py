"""Files for GitHub and Docker: workflows call existing commands and use the package's Python versions."""

import re
import tomllib
from typing import Any

import yaml
from support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS: dict[str, Any] = {
    file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in (ROOT / ".github/workflows").glob("*.yml")
}


def test_workflows_call_existing_make_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    called = {command.split()[1] for command in commands if command.startswith("make ")}
    assert called == {"test", "unit", "test-vllm", "test-llamacpp", "docs", "release"}
    assert called <= targets
    assert len(commands) == 6


def test_workflows_run_the_packages_python_versions() -> None:
    versions = WORKFLOWS["tests"]["jobs"]["linux"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    assert versions == [name.removeprefix(prefix) for name in PROJECT["classifiers"] if name.startswith(prefix)]
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_image_installs_existing_extras() -> None:
    extras = re.findall(r"/src\[([\w,]+)\]", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert len(extras) == 1
    assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()
