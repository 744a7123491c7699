"""`train/train_parallel.py` under a launcher, with signals to processes at the start of a step.

launch(CPU_X2, recipe)                              # as `accelerate launch` starts it
launch(CPU_X2, recipe, signals={1: (5, "SIGKILL")})  # the second process, in its fifth step
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from support.places import ROOT
from support.tiny_runs import recipe_file
from transformers import TrainerCallback

from draftsmith.recipes.schema import Recipe

SCRIPT = ROOT / "train" / "train_parallel.py"
CPU_X2 = ROOT / "recipes" / "accelerate" / "cpu_x2.yaml"
SIGNALS = "TEST_SIGNALS"  # {rank: [step, name]}
NOT_LEFT = "the interpreter ends while its process group is there"


def _environment(signals: dict[int, tuple[int, str]] | None) -> dict[str, str]:
    values = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if signals is not None:
        values[SIGNALS] = json.dumps(signals)
        values["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return values


def launch(
    config: Path, recipe: Recipe, *overrides: str, signals: dict[int, tuple[int, str]] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch` on a free port until it ends."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    script = SCRIPT if signals is None else Path(__file__)
    return subprocess.run(
        [*command, str(config), str(script), recipe_file(recipe), *overrides],
        capture_output=True, text=True, check=False, env=_environment(signals), timeout=300,
    )  # fmt: skip


class SignalItself(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, name = json.loads(os.environ[SIGNALS]).get(os.environ["RANK"], (0, ""))
        if state.global_step == step - 1:
            os.kill(os.getpid(), getattr(signal, name))


def _say_whether_it_left() -> None:
    if torch.distributed.is_initialized():
        print(NOT_LEFT, file=sys.stderr, flush=True)


def main() -> None:
    """Run the script with one more callback in its trainer."""
    from draftsmith.train.drafter import stage
    from draftsmith.train.drafter.trainer import DrafterTrainer

    class Signalled(DrafterTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[SignalItself()], **kwargs)

    stage.DrafterTrainer = Signalled  # type: ignore[misc]
    atexit.register(_say_whether_it_left)  # the first one registered is the last one called
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
