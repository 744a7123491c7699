"""`draftsmith doctor`: everything about a recipe that can be found out before hours of training, in one checklist.

The data (`doctor_data`), the target (can it run draft trees?) and the drafter (is it trained on what it is asked for
while decoding? `draftsmith.train.drafter.parity`).
"""

from dataclasses import asdict, dataclass
from itertools import groupby
from math import isfinite
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.data.tokens.chat_tokens import TokenizedConversation
from draftsmith.eval.commands.doctor_data import Checked, Expected, Finding, check_source, check_token_rows
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.base.registry import TRAINING_FILE, load_drafter_class
from draftsmith.models.cpu_kernels import has_kernels
from draftsmith.models.formats.exporting import (
    caveat,
    check_format,
    kind_of,
    loading_words,
    refusal,
    serving_command,
)
from draftsmith.models.target.loading import load_target, target_location
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import first_stage
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.parity import TOLERANCE, check_parity
from draftsmith.train.drafter.start import start_folder, start_from, start_sentence
from draftsmith.train.drafter.training_arguments import training_arguments

STYLES = {"ok": "green", "warning": "yellow", "defect": "bold red"}
PREVIEW_TOKENS = 400
LARGE_BYTES = 2**27  # of weights, of which a step takes as long as reading them does


@dataclass
class Diagnosis:
    """Findings under their headings, and rows to look at."""

    recipe_name: str
    parts: list[Checked]
    tokenizer: Any

    @property
    def findings(self) -> list[Finding]:
        return [finding for part in self.parts for finding in part.findings]

    @property
    def healthy(self) -> bool:
        """No defect; warnings may be meant."""
        return all(finding.severity != "defect" for finding in self.findings)

    def show(self, console: Console, preview_rows: int) -> None:
        """The preview, then the checklist, so that the result is what stands last."""
        rows = rows_of(self.parts)[:preview_rows]
        if rows:
            console.print(_legend(console))
        for number, row in enumerate(rows, start=1):
            console.print(f"\nRow {number}: {len(row.input_ids)} tokens, {sum(row.loss_mask)} of them carry loss")
            console.print(preview(self.tokenizer, row, marks=console.color_system is None))
        for part in self.parts:
            console.print(f"\n{part.heading}", style="bold", markup=False)
            for finding in part.findings:
                line = Text.assemble(
                    ("  " + finding.severity.ljust(8), STYLES[finding.severity]), finding.check.ljust(24)
                )
                console.print(line.append(finding.sentence))
        counts = [sum(finding.severity == severity for finding in self.findings) for severity in ("defect", "warning")]
        console.print(f"\n{counts[0]} defects, {counts[1]} warnings", style="bold red" if counts[0] else "bold green")

    def as_json(self) -> dict[str, Any]:
        """All findings, with their figures."""
        findings = [{"part": part.heading, **asdict(finding)} for part in self.parts for finding in part.findings]
        return {"recipe": self.recipe_name, "healthy": self.healthy, "findings": findings}


def examine(recipe: Recipe, serve: str | None = None) -> Diagnosis:
    """Look at data, target and drafter. Writes nothing.

    Args:
        serve: A format of `models/formats/exporting.py` that the drafter is to be served in.

    Raises:
        UserError: The target cannot be loaded, so that nothing can be examined, or there is no such format.
    """
    if serve is not None:
        check_format(serve)
    target, tokenizer = load_target(recipe.target)
    parts = _data(recipe, target, tokenizer)
    rows = rows_of(parts)
    parts.append(Checked("target", [_draft_trees(target), *_dtype(target)]))
    parts.append(
        Checked(
            f"drafter ({recipe.drafter.kind})",
            [_training_arguments(recipe), *_start(recipe, target), _drafter(recipe, target, rows)],
        )
    )
    if serve is not None:
        parts.append(Checked(f"served by {serve}", _served(recipe, target, serve)))
    return Diagnosis(recipe.name, parts, tokenizer)


def rows_of(parts: list[Checked]) -> list[TokenizedConversation]:
    """Those nearest to training: of the distilled tokens if there are any, else of the source."""
    return next((part.rows for part in reversed(parts) if part.rows), [])


def preview(tokenizer: Any, row: TokenizedConversation, marks: bool = False) -> Text:
    """The row's text: what carries loss in colour, the rest dim; `marks` puts it between « and » too."""
    text = Text()
    shown = list(zip(row.input_ids, row.loss_mask, strict=True))[:PREVIEW_TOKENS]
    for carries_loss, run in groupby(shown, key=lambda pair: bool(pair[1])):
        # A negative id is a defect of the data that is reported elsewhere; decode() would raise.
        piece = tokenizer.decode([max(0, token_id) for token_id, _ in run], skip_special_tokens=False)
        text.append(f"«{piece}»" if marks and carries_loss else piece, "bold green" if carries_loss else "dim")
    if len(row.input_ids) > PREVIEW_TOKENS:
        text.append(f" ... and {len(row.input_ids) - PREVIEW_TOKENS} more tokens", "italic")
    return text


def _legend(console: Console) -> Text:
    if console.color_system is None:
        return Text("What carries loss stands between « and ».")
    return Text.assemble("Carries loss: ", ("supervised", "bold green"), ", does not: ", ("context", "dim"))


def _data(recipe: Recipe, target: PreTrainedModel, tokenizer: Any) -> list[Checked]:
    try:
        expected = Expected.of(target, tokenizer)
    except UserError as error:
        return [Checked("data", [Finding("chat template", "defect", str(error))])]
    parts = [check_source(recipe, expected)]
    run = RunFolder(recipe)
    if (run.data / "tokens").is_dir():
        try:
            dataset = load_tokens(run, recipe.name)
        except UserError as error:
            parts.append(Checked("tokens to train on", [Finding("tokens", "defect", str(error))]))
        else:
            parts.append(check_token_rows(dataset, run.data, expected))
    return parts


def _draft_trees(target: PreTrainedModel) -> Finding:
    """The session's probe: does the target take a 4-D mask and position ids?"""
    try:
        TargetSession(target, max_length_tokens=8).close()
    except UserError as error:
        return Finding("draft trees", "defect", str(error))
    return Finding("draft trees", "ok", "the target obeys 4-D attention masks and position ids")


def _dtype(target: PreTrainedModel) -> list[Finding]:
    """On a CPU, whether another dtype would be faster.

    A step takes as long as reading the weights does: bf16, whose kernels sum in fp32, has half the bytes.
    """
    if target.device.type != "cpu":
        return []
    weights_bytes = sum(weight.numel() * weight.element_size() for weight in target.parameters())
    if target.dtype == torch.float32 and weights_bytes > LARGE_BYTES and has_kernels():
        sentence = (
            "float32; in bfloat16 a step reads half as much, and sums are of float32 in both "
            "(target.dtype=bfloat16, for decoding at least)"
        )
        return [Finding("dtype", "ok", sentence)]
    if target.dtype == torch.float16:
        better = "bfloat16" if has_kernels() else "float32"
        return [Finding("dtype", "warning", f"CPUs are slow in float16: set target.dtype={better}")]
    if target.dtype == torch.bfloat16 and not has_kernels():
        sentence = (
            "without the kernels that a C++ compiler would build, CPUs may be slow in bfloat16: "
            "install g++ or clang++, or set target.dtype=float32"
        )
        return [Finding("dtype", "warning", sentence)]
    return []


def _training_arguments(recipe: Recipe) -> Finding:
    folder = RunFolder(recipe).drafter / "checkpoints"
    try:
        training_arguments(recipe.train, folder, recipe.seed, use_cpu=recipe.target.device == "cpu")
    except UserError as error:
        return Finding("train section", "defect", str(error))
    return Finding("train section", "ok", "transformers.TrainingArguments takes it")


def _start(recipe: Recipe, target: PreTrainedModel) -> list[Finding]:
    """Whether the drafter that training starts from is there and fits, if it is to start from one."""
    check, init = "drafter.init", str(recipe.drafter.init)
    try:
        first = first_stage(recipe)
        if first is not None and not (RunFolder(first).drafter / TRAINING_FILE).is_file():
            return [Finding(check, "ok", f"`draftsmith run` trains the drafter of {init} first")]
        folder = start_folder(recipe)
        if folder is None:
            return []
        drafter = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options)
        return [Finding(check, "ok", start_sentence(start_from(drafter, folder, init)))]
    except UserError as error:
        return [Finding(check, "defect", str(error))]


def _served(recipe: Recipe, target: PreTrainedModel, to: str) -> list[Finding]:
    """Whether this drafter could be exported, before it is trained."""
    try:
        config = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options).config
    except UserError as error:
        return [Finding("export", "defect", str(error))]
    refused, warned = refusal(config, to), caveat(config, to)
    if refused is not None:
        return [Finding("export", "defect", f"{kind_of(config)}: {refused}")]
    target_is = target_location(recipe.target)
    command = serving_command(config, to, target_is, "FOLDER", loading_words(recipe.target))
    found = [Finding("export", "ok", f"`draftsmith export --to {to}` can write it")]
    found += [] if command is None else [Finding("command", "ok", command)]
    return found if warned is None else [*found, Finding("first token", "warning", warned)]


def _drafter(recipe: Recipe, target: PreTrainedModel, rows: list[TokenizedConversation]) -> Finding:
    """Train = decode, for a new drafter on one of the rows."""
    kind, check = recipe.drafter.kind, "train = decode"
    try:
        found = check_parity(kind, recipe.drafter.options, target, rows)
    except UserError as error:
        return Finding("drafter", "defect", str(error))
    except torch.OutOfMemoryError:
        sentence = "not checked: the target in fp32 does not fit into the GPU's memory; try target.device=cpu"
        return Finding(check, "warning", sentence)
    worst = found.worst
    figures = {
        "kind": kind,
        "largest_difference": worst.size if isfinite(worst.size) else None,
        "tolerance": TOLERANCE,
        "prefix_tokens": worst.prefix_tokens,
        "depth": worst.depth,
        "drafts": found.drafts,
        "row_tokens": found.row_tokens,
        "trainable_parameters": found.parameters,
    }
    measured = f"largest difference {worst.size:.1e} of the logits' spread (tolerance {TOLERANCE:.0e})"
    if worst.size <= TOLERANCE:
        agrees = f"training = decoding after {found.drafts} prefixes"
        return Finding(check, "ok", f"{kind}, {found.parameters:,} parameters: {agrees}, {measured}", figures)
    sentence = (
        f"{kind} decodes something else than it would be trained on: {measured}, at depth {worst.depth} after "
        f"{worst.prefix_tokens} tokens; compare group_logits with the decoder in models/drafters/{kind}.py: group t "
        "reads x_t and the feature at t-1, and depth d predicts x_(t+d)"
    )
    return Finding(check, "defect", sentence, figures)
