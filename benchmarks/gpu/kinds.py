"""Every kind of drafter on the embedded target: training against decoding, steps in bf16, and greedy answers.

For each kind: the doctor's parity in fp32; the losses of a few steps under bf16 autocast with fused AdamW; answers with
a chain and a tree, as they are and compiled, which must be the target's token for token.
"""

import time
from typing import Any

import torch

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.models.decoding.decoders import Compilable
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import MethodConfig, TargetRecipe
from draftsmith.train.drafter.parity import TOLERANCE, check_parity
from gpu.step import Step, run_step

FIRST = ("parallel", "eagle", "medusa", "eagle_parallel", "eagle3", "hydra")  # most used, in case time is short
PROMPT = list(range(5, 45))
SESSION_TOKENS = 160
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "tree": {"tree": "best_first", "nodes": 7, "branch": 4},
}


def main(step: Step) -> None:
    kinds = sorted(drafter_kinds(), key=lambda kind: (FIRST.index(kind) if kind in FIRST else len(FIRST), kind))
    number, count = (int(each) for each in (step.part_name or "1/1").split("/"))
    for kind in kinds[number - 1 :: count][: step.size(len(kinds), 1)]:
        if not step.has_time(kind, step.size(15, 5)):
            continue
        started = time.perf_counter()
        for check in (parity, losses, answers):
            with step.part(f"{kind}.{check.__name__}"):
                step.add(f"{kind}.{check.__name__}", check(step, kind))
        step.add(f"{kind}.seconds", time.perf_counter() - started)


def options_of(kind: str) -> dict[str, Any]:
    """Return the drafter's options in `quickstart`, or the defaults of another kind."""
    return load_recipe("quickstart", [f"drafter.kind={kind}"]).drafter.options


def target_in(step: Step, dtype: str) -> Any:
    return load_target(TargetRecipe(model="embedded", dtype=dtype, device=str(step.device)))[0]


def parity(step: Step, kind: str) -> dict[str, Any]:
    """Compare training with decoding, as `draftsmith doctor` does."""
    worst = check_parity(kind, options_of(kind), target_in(step, "float32"), []).worst.size
    return {"worst": worst, "is_within_tolerance": worst <= TOLERANCE}


def losses(step: Step, kind: str) -> dict[str, Any]:
    """Train for a few steps on one batch, whose second row is shorter."""
    target = target_in(step, "bfloat16")
    torch.manual_seed(0)
    drafter = load_drafter_class(kind).from_target(target, options_of(kind)).train()
    drafter.training_step = 10_000  # behind the schedules of losses
    ids_bs = torch.randint(3, 4000, (2, 96), device=step.device)
    loss_mask_bs = torch.ones_like(ids_bs)
    loss_mask_bs[:, :8] = 0
    loss_mask_bs[1, 60:] = 0
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    values = []
    for _ in range(6):
        features, teacher = drafter.training_features(target, ids_bs)
        with torch.autocast(step.device.type, torch.bfloat16):
            out = drafter(ids_bs, features, loss_mask_bs, teacher_features=teacher)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values.append(out.loss.item())
    return {"losses": values, "falls": values[-1] < values[0]}


def answers(step: Step, kind: str) -> dict[str, Any]:
    """Compare greedy answers with the target's own, in fp32; then draw one answer at T = 1."""
    target = target_in(step, "float32")
    torch.manual_seed(0)
    drafter = load_drafter_class(kind).from_target(target, options_of(kind)).freeze()
    results: dict[str, Any] = {}
    new_tokens = step.size(48, 12)
    with TargetSession(target, SESSION_TOKENS, drafter.feature_layers) as session:
        expected = generate(session, Autoregressive(), PROMPT, Sampling(), new_tokens).ids
        for is_compiled in (False, True)[: step.size(2, 1)]:
            decoder = drafter.decoder(SESSION_TOKENS)
            if is_compiled:
                if not isinstance(decoder, Compilable):
                    continue
                decoder.compile()
            for name, tree in TREES.items():
                method = build_tree_drafter(MethodConfig.model_validate({"name": "x", **tree}), decoder, Sampling())
                answer = generate(session, method, PROMPT, Sampling(), new_tokens)
                results[f"{name}, compiled" if is_compiled else name] = {
                    "is_identical": answer.ids == expected,
                    "rounds": answer.rounds,
                    "seconds": answer.wall_time_s,
                }
        generator, sampling = torch.Generator(step.device), Sampling(1.0)
        method = build_tree_drafter(MethodConfig(name="x"), drafter.decoder(SESSION_TOKENS), sampling, generator)
        drawn = generate(session, method, PROMPT, sampling, new_tokens, (), generator)
        results["drawn"] = {"rounds": drawn.rounds, "seconds": drawn.wall_time_s}
    return results


if __name__ == "__main__":
    run_step(main)
