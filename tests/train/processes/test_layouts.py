"""Checkpoints of every layout: what is missing or cut off is named, and another launch's is refused."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as distributed_checkpoint

from draftsmith.recipes.errors import UserError
from draftsmith.train.drafter.checkpoints import what_is_damaged
from draftsmith.train.processes.launch import Launch
from draftsmith.train.processes.layouts import layout_of, refuse_other_launch

STATE = '{"global_step": 4, "max_steps": 6, "epoch": 1.0, "log_history": [], "stateful_callbacks": {}}'


def checkpoint(tmp_path: Path, layout: str, processes: int = 2) -> Path:
    """As its launch writes it."""
    folder = tmp_path / "checkpoints" / "checkpoint-4"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(STATE)
    weights = {"weight": torch.arange(4096.0)}
    for rank in range(processes):
        torch.save({}, folder / (f"rng_state_{rank}.pth" if processes > 1 else "rng_state.pth"))
    if layout == "fsdp":
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            distributed_checkpoint.save(weights, checkpoint_id=folder / name, no_dist=True)
        torch.save({}, folder / "scheduler.pt")
    elif layout == "zero":
        (folder / "global_step4").mkdir()
        torch.save(weights, folder / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        (folder / "latest").write_text("global_step4")
        torch.save({}, folder / "scheduler.pt")
    else:
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.save(weights, folder / name)
    return folder


@pytest.mark.parametrize("layout", ["whole", "fsdp", "zero"])
def test_a_whole_one(tmp_path: Path, layout: str) -> None:
    folder = checkpoint(tmp_path, layout)
    assert layout_of(folder) == layout
    assert what_is_damaged(folder) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("layout", "name", "said"),
    [
        ("fsdp", "optimizer_0/__0_0.distcp", "optimizer_0/__0_0.distcp is not whole"),
        ("fsdp", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/.metadata: "),
        ("zero", "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ],
)
def test_cut_off(tmp_path: Path, layout: str, name: str, said: str) -> None:
    folder = checkpoint(tmp_path, layout)
    cut(folder / name)
    assert said in (what_is_damaged(folder) or "")


def test_missing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "fsdp")
    (folder / "optimizer_0" / ".metadata").unlink()
    assert what_is_damaged(folder) == "optimizer_0 was not written to its end"
    (folder / "optimizer_0").rename(folder / "aside")
    assert what_is_damaged(folder) == "optimizer_0 is missing"


def test_latest_names_what_is_not_there(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "zero")
    (folder / "latest").write_text("global_step6")
    assert what_is_damaged(folder) == "latest names no folder that is there"


@pytest.mark.parametrize(
    ("layout", "written_by", "launch", "said"),
    [
        ("whole", 2, Launch("single"), r"was written by 2 processes and there is one now: .* so launch 2 again"),
        ("whole", 1, Launch("ddp", 4), r"was written by 1 process and there are 4 now"),
        ("fsdp", 2, Launch("ddp", 2), r"was written under FSDP2, which DDP cannot read: launch it as before"),
        ("zero", 2, Launch("fsdp", 2, 2), r"was written under DeepSpeed, which FSDP2 cannot read"),
        ("whole", 2, Launch("zero", 2, 3), r"was written under DDP or one process, which ZeRO-3 cannot read"),
    ],
)
def test_another_launch_is_refused(tmp_path: Path, layout: str, written_by: int, launch: Launch, said: str) -> None:
    with pytest.raises(UserError, match=said):
        refuse_other_launch(checkpoint(tmp_path, layout, written_by), launch)


@pytest.mark.parametrize(
    ("layout", "launch"),
    [("whole", Launch("ddp", 2)), ("fsdp", Launch("fsdp", 2, 2)), ("zero", Launch("zero", 2, 1))],
)
def test_its_own_launch_goes_on(tmp_path: Path, layout: str, launch: Launch) -> None:
    refuse_other_launch(checkpoint(tmp_path, layout), launch)
