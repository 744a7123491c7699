"""Distilling the embedded target with `engine: transformers`, in generated tokens per second."""

from draftsmith.cli.stages import run_distill
from draftsmith.recipes.loading import load_recipe
from gpu.step import Step, run_step


def main(step: Step) -> None:
    for name, conversations in (("warm-up", 4), ("measured", step.size(400, 4))):
        overrides = [f"runs_dir={step.folder / 'runs'}", f"name=distill-{name}", f"target.device={step.device}"]
        overrides += [f"data.conversations.limit={conversations}"]
        overrides += step.size([], ["data.distill.max_new_tokens=48"])
        report = run_distill(load_recipe("quickstart", overrides))["conversations"]
        rate = report["tokens_generated"] / report["seconds"] if report["seconds"] else 0.0
        figures = {key: report[key] for key in ("kept", "answers", "tokens_generated", "seconds")}
        step.add(name, figures | {"tokens_per_s": rate})


if __name__ == "__main__":
    run_step(main)
