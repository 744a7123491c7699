"""`draftsmith doctor`: each real defect is found and reported, with exit code 1."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support import tiny_tokenizers as templates
from support.tiny_models import long_rope
from support.tiny_runs import recipe_file, recipe_in, save_trained
from support.tiny_tokenizers import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from draftsmith.cli import doctor
from draftsmith.cli import main as cli
from draftsmith.data.engines import vllm_engine
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.decoding.decoders import ParallelDecoder
from draftsmith.models.formats.importing import IMPORT_FILE
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder

VOCABULARY = 400
TALK = [
    {"messages": [{"role": "user", "content": f"Say hi {n}"}, {"role": "assistant", "content": "Hello there " * 4}]}
    for n in range(3)
]
TWO_ROUNDS = {
    "messages": [
        *TALK[0]["messages"], {"role": "user", "content": "and?"}, {"role": "assistant", "content": "answer " * 20},
    ]
}  # fmt: skip
WITH_SYSTEM = {"messages": [{"role": "system", "content": "you are a helper"}, *TALK[0]["messages"]]}


def turns(user: str, assistant: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


@dataclass
class Clinic:
    """Folder with a tiny target, its tokenizer, a source file and a recipe."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast

    def examine(self, *overrides: str, rows: int = 0) -> tuple[int, dict[str, Any], str]:
        """Run doctor; return the exit code, findings by `part/check`, and the output."""
        file = self.folder / "out.json"
        command = ["doctor", str(self.folder / "mine.yaml"), *overrides, f"--rows={rows}", f"--json={file}"]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code in (0, 1), result.output
        values = json.loads(file.read_text())
        assert values["healthy"] == (result.exit_code == 0)
        findings = {f"{entry['part'].split()[0]}/{entry['check']}": entry for entry in values["findings"]}
        assert len(findings) == len(values["findings"])
        for entry in values["findings"]:
            assert entry["sentence"] in result.stdout
        return result.exit_code, findings, result.stdout

    def rows(self) -> list[TokenizedConversation]:
        newline = self.tokenizer.encode("\n", add_special_tokens=False)  # as the next turn would begin
        rows = tokenized(self.tokenizer, TALK)
        return [TokenizedConversation(row.input_ids + newline, [*row.loss_mask, 0]) for row in rows]

    def distilled(self, rows: list[TokenizedConversation]) -> None:
        """Write rows as distillation would."""
        columns = {"input_ids": [row.input_ids for row in rows], "loss_mask": [row.loss_mask for row in rows]}
        datasets.Dataset.from_dict(columns).save_to_disk(str(self.folder / "runs" / "mine" / "data" / "tokens"))


def tokenized(tokenizer: Any, records: list[Any]) -> list[TokenizedConversation]:
    return [row for record in records for row in tokenize_rows(tokenizer, parse_conversation(record, "here"), 512)[0]]


def clinic(
    folder: Path,
    template: str = templates.CHATML,
    source: list[Any] | None = None,
    pad: str = "<pad>",
    **model: Any,
) -> Clinic:
    torch.manual_seed(0)
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": 0,
        "eos_token_id": 1, "initializer_range": 0.3,
    }  # fmt: skip
    config = AutoConfig.for_model("llama", **{**values, **model})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer(template)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(folder / "target")
    lines = [record if isinstance(record, str) else json.dumps(record) for record in source or TALK]
    (folder / "talk.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "conversations": {"source": str(folder / "talk.jsonl")},
        "distill": {"max_new_tokens": 32},
        "max_length_tokens": 250,
    }
    recipe_file(recipe_in(folder, "mine", data=data))
    return Clinic(folder, tokenizer)


def test_healthy_recipe_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "PMI_SIZE": "x"}.items():  # of a launch, and doctor is in none
        monkeypatch.setenv(name, value)
    code, findings, printed = clinic(tmp_path).examine(rows=1)
    assert code == 0
    assert findings["drafter/engines"]["figures"] == {"loading": ["vLLM"]}
    assert "0 defects, 0 warnings\n" in printed
    assert {entry["severity"] for entry in findings.values()} == {"ok"}
    rows = tokenized(tiny_tokenizer(templates.CHATML), TALK)
    share = findings["source/supervised tokens"]["figures"]
    assert share["tokens"] == sum(len(row.input_ids) for row in rows)
    assert share["loss_tokens"] == sum(sum(row.loss_mask) for row in rows)
    assert findings["source/end tokens"]["figures"]["answers"] == 3
    assert findings["source/over-long"]["sentence"] == "no answer lies beyond 250 tokens"
    assert 0 < findings["drafter/train = decode"]["figures"]["largest_difference"] < 1e-4
    assert "«Hello there Hello there Hello there Hello there <|im_end|>»\n" in printed
    assert "Next: draftsmith distill" in printed
    assert not (tmp_path / "runs").exists()


def no_loss_at(end: int) -> Any:
    """Return a mask without the end token's loss."""
    return lambda row, t: int(row.loss_mask[t] and row.input_ids[t] != end)


SERVED = "data.features={source: server, server: {urls: ['http://h:8000']}}"
# Changes to the folder, or the mask of the tokens; overrides; the defect's place; its message.
DEFECTS: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "every token is the assistant's": (
        {"template": "{% for m in messages %}{{ m.content if m.role == 'assistant' }}{% endfor %}"}, [],
        "chat/chat template", "leaves out the text of user turns .*: set target.chat_template",
    ),
    "the template refuses system turns": (
        {"template": templates.LLAMA2, "source": [*TALK, WITH_SYSTEM]}, [],
        "source/chat template", "fails for 1 of 4 conversations.*skip_invalid=true",
    ),
    "double BOS": (
        {"template": "{{ bos_token }}<s>" + templates.CHATML}, [],
        "source/double BOS", "3 of 3 examples start with <s> twice instead of once: set target.chat_template",
    ),
    "no end token": (
        {"template": templates.NO_END_TOKEN}, [],
        "source/end tokens", "of 3 answers 3 do not end with </s>, so the drafter would not learn to stop",
    ),
    "a turn that is no text": (
        {"source": [*TALK, {"messages": [{"role": "user", "content": 3}]}, {"messages": []}]}, [],
        "source/invalid conversations", r"2 \(.*, 3 valid conversations; distillation would stop at .*skip_invalid",
    ),
    "no such file": ({}, ["data.conversations.source=gone.jsonl"], "source/source", "gone.jsonl does not exist"),
    "too long": (
        {}, ["data.max_length_tokens=8", "data.distill.engine=none"],
        "source/over-long", "3 conversations have no answer before, so no conversation is left: raise",
    ),
    "more tokens than positions": (
        {"max_position_embeddings": 20}, ["data.distill.engine=none"],
        "source/positions", "but the target has 20 positions: set data.max_length_tokens to 20",
    ),
    "a switch of RoPE": (
        {"rope_parameters": long_rope(240)}, ["data.distill.engine=none"],
        "source/positions", "may have 250 tokens, but the target's RoPE .* one beyond 240 tokens: set .* to 240",
    ),
    "no room for answers": (
        {"max_position_embeddings": 64}, ["data.distill.max_new_tokens=60"],
        "source/room for answers",
        r"none of 3 prompts leaves room .*=60 within the target's 64 positions, .* tokens: set .* to \d+ at most,",
    ),
    "no token of thoughts": (
        {}, ["data.reasoning=mask"], "source/thoughts", "no token <think>, so that its reasoning cannot be separated",
    ),
    "an option of no engine": (
        {}, ["data.distill.options={batchsize: 3}"], "distillation/engine", "did you mean `batch_size`",
    ),
    "another tokenizer": (
        {"vocab_size": 60}, [],
        "source/vocabulary", r"tokens \(ids .*\) are outside the target's vocabulary of 60: use the tokenizer",
    ),
    "no such drafter": ({}, ["drafter.kind=paralel"], "drafter/drafter", "use one of .*parallel"),
    "no such option": ({}, ["drafter.options.num_mask=3"], "drafter/drafter", "did you mean `num_masks`"),
    "no such training key": ({}, ["train.learning_rat=1"], "drafter/train section", "did you mean `learning_rate`"),
    "no evaluations": ({}, ["validation.keep=best"], "drafter/train section", "`validation` needs evaluations"),
    "no loss at all": (
        {"mask": lambda row, t: 0}, [], "tokens/supervised tokens", "none of .* tokens carries loss",
    ),
    "an end token without loss": (
        {"mask": no_loss_at(4)}, [],
        "tokens/end tokens", "3 end with a token that carries no loss.*run `draftsmith distill` again",
    ),
    "an end token that is also the pad token": (
        {"mask": no_loss_at(1), "template": templates.ZEPHYR, "pad": "</s>"}, [], "tokens/end tokens",
        r"3 end with a token that carries no loss \(</s> is also the pad token, and must carry loss here\)",
    ),
    "loss after the end token": (
        {"mask": lambda row, t: int(row.loss_mask[t] or (t > 0 and row.loss_mask[t - 1]))}, [],
        "tokens/end tokens", "3 carry loss after their end token",
    ),
    "a kind that needs the layers of a served target": (
        {}, [SERVED, "drafter={kind: medusa2}"],
        "drafter/drafter", "`medusa2` cannot be trained on features from disk or servers",
    ),
    "an engine that has no place for the kind": (
        {"num_hidden_layers": 4}, ["--serve=sglang", "drafter={kind: peagle}"],
        "served/export", "has no place for peagle: train with drafter.kind=eagle3",
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], list[str], str, str]] = {
    "thoughts": (
        "warning", {"template": "{% if enable_thinking %}{% endif %}" + templates.CHATML}, [],
        "chat/thoughts", r"target.chat_template_kwargs=\{enable_thinking: false\}",
    ),
    "no generation prompt": (
        "warning", {"template": templates.CHATML.split("{% if add_generation_prompt")[0]}, [],
        "chat/generation prompt", r"no header of an answer \(<\|im_start\|>assistant\) in generation prompt",
    ),
    "keys that are not read": (
        "ok", {"source": [each | {"model": "m"} for each in TALK]}, [],
        "source/source talk", r"keys not read: `model` \(3\)$",
    ),
    "no engine": (
        "warning", {}, ["drafter={kind: hydra}"], "drafter/engines", "only draftsmith's own loop and server",
    ),
    "one engine": (
        "ok", {"num_hidden_layers": 4}, ["drafter={kind: peagle}"], "drafter/engines",
        "vLLM can load this drafter; not SGLang: sglang takes",
    ),
    "three engines": (
        "ok", {"num_hidden_layers": 4}, ["drafter={kind: eagle3, options: {first_token: false}}"],
        "drafter/engines", "^vLLM, SGLang, llama.cpp can load this drafter$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_found(name: str, tmp_path: Path) -> None:
    changes, overrides, check, sentence = DEFECTS[name]
    mask = changes.get("mask")
    case = clinic(tmp_path, **{key: value for key, value in changes.items() if key != "mask"})
    if mask is not None:
        case.distilled(with_mask(case.rows(), mask))
    code, findings, printed = case.examine(*overrides)
    assert code == 1
    defects = {key: entry["sentence"] for key, entry in findings.items() if entry["severity"] == "defect"}
    assert list(defects) == [check]
    assert re.search(sentence, defects[check])
    assert "1 defect, " in printed
    assert "Next:" not in printed


@pytest.mark.parametrize("name", OTHERS)
def test_warning_or_remark(name: str, tmp_path: Path) -> None:
    severity, changes, overrides, check, sentence = OTHERS[name]
    code, findings, _ = clinic(tmp_path, **changes).examine(*overrides)
    assert (code, findings[check]["severity"]) == (0, severity)
    assert re.search(sentence, findings[check]["sentence"])


def test_bf16_is_slow_without_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "multiplies_bf16_fast", lambda device: False)
    _, findings, _ = clinic(tmp_path).examine("train.bf16=true")
    assert "set it to false" in findings["drafter/train section"]["sentence"]


@pytest.mark.parametrize("kind", ["parallel", "dflash2"])
def test_served_target_is_not_loaded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and decoding are compared on random features; dflash2's rounding in fp32 is no defect."""
    monkeypatch.setattr(doctor, "load_target", None)
    code, findings, _ = clinic(tmp_path, num_hidden_layers=4).examine(SERVED, f"drafter={{kind: {kind}}}")
    assert code == 0
    assert findings["target/draft trees"]["sentence"] == "not checked: the target is served"
    assert 0 <= findings["drafter/train = decode"]["figures"]["largest_difference"] < 1e-4


def with_mask(rows: list[TokenizedConversation], change: Any) -> list[TokenizedConversation]:
    return [TokenizedConversation(row.input_ids, [change(row, t) for t in range(len(row.input_ids))]) for row in rows]


def test_possible_mistakes_are_warnings(tmp_path: Path) -> None:
    """Skipping is on; a third of the conversations is cut; the tokenizer has tokens that no row has."""
    case = clinic(
        tmp_path,
        source=[TALK[1], TALK[2], TWO_ROUNDS, "{not json"],
        vocab_size=len(tiny_tokenizer("")),
    )
    case.tokenizer.add_tokens(["<extra>"])
    case.tokenizer.save_pretrained(tmp_path / "target")
    code, findings, _ = case.examine("data.conversations.skip_invalid=true", "data.max_length_tokens=60")
    assert code == 0
    warnings = {key for key, entry in findings.items() if entry["severity"] == "warning"}
    checks = ("invalid conversations", "over-long", "vocabulary")
    assert warnings == {f"source/{check}" for check in checks}
    assert findings["source/over-long"]["figures"] == {"cut": 1, "too_long": 0, "conversations": 3}


def test_kept_answers_without_an_end_are_a_warning(tmp_path: Path) -> None:
    case = clinic(tmp_path, source=[{"prompt": f"Say hi {n}"} for n in range(3)])
    _, findings, _ = case.examine()
    assert findings["source/without answers"]["figures"] == {"unanswered": 3}
    kept = ("data.distill.max_new_tokens=2", "data.distill.cut_answers=keep")
    assert CliRunner().invoke(cli.app, ["distill", str(tmp_path / "mine.yaml"), *kept]).exit_code == 0
    code, findings, _ = case.examine(*kept)
    assert (code, findings["tokens/end tokens"]["severity"]) == (0, "warning")
    assert findings["tokens/end tokens"]["sentence"].startswith("3 answers were cut at max_new_tokens and kept")
    assert "source/without answers" not in findings


def test_engine_that_is_not_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported by doctor, and by distill before anything is read or written."""
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    case = clinic(tmp_path)
    code, findings, _ = case.examine("data.distill.engine=vllm")
    assert code == 1
    assert "needs vLLM in this environment: pip install" in findings["distillation/engine"]["sentence"]
    shutil.rmtree(tmp_path / "target")
    overrides = ("data.distill.engine=vllm", "data.conversations.source=nowhere.jsonl")
    result = CliRunner().invoke(cli.app, ["distill", str(tmp_path / "mine.yaml"), *overrides])
    assert result.exit_code == 2
    assert "needs vLLM in this environment" in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


def test_target_that_ignores_the_mask_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaForCausalLM.forward

    def ignore_mask(self: Any, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        return forward(self, *args, attention_mask=None, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", ignore_mask)
    code, findings, _ = clinic(tmp_path, num_hidden_layers=2).examine()
    assert code == 1
    assert "ignores 4-D attention masks" in findings["target/draft trees"]["sentence"]


def test_decoder_that_is_off_by_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = clinic(tmp_path)
    observe = ParallelDecoder.observe
    monkeypatch.setattr(ParallelDecoder, "observe", lambda self, ids, features: observe(self, ids, features.roll(1, 0)))
    code, findings, printed = case.examine()
    assert code == 1
    finding = findings["drafter/train = decode"]
    assert finding["figures"]["largest_difference"] > 0.01
    assert "parallel computes other logits in decoding than in training" in finding["sentence"]
    assert f"{finding['figures']['largest_difference']:.1e}" in printed
    assert ParallelDecoder.__module__.removeprefix("draftsmith.").replace(".", "/") in finding["sentence"]


def test_serve_command_is_shown(tmp_path: Path) -> None:
    mine = clinic(tmp_path, num_hidden_layers=4)
    _, findings, _ = mine.examine("--serve", "vllm", "drafter.kind=peagle", "drafter.options={}")
    assert "`draftsmith export --to vllm` can write this drafter" in findings["served/export"]["sentence"]
    asked = '{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 5, "parallel_drafting": true}'
    assert asked in findings["served/command"]["sentence"]
    assert "drafter.options.first_token=false" in findings["served/first token"]["sentence"]
    _, findings, _ = mine.examine("--serve", "vllm", "drafter.kind=peagle", "drafter.options={first_token: false}")
    assert "served/first token" not in findings
    _, findings, _ = mine.examine("--serve", "vllm", "drafter.kind=parallel", "drafter.options={}")
    assert "with draftsmith in its environment" in findings["served/export"]["sentence"]
    own = ["drafter.kind=peagle", "name=theirs"]
    recipe = load_recipe(tmp_path / "mine.yaml", own)
    drafter = load_drafter_class("peagle").from_target(load_target(recipe.target)[0], {"num_masks": 2})
    save_trained(recipe, drafter)
    (RunFolder(recipe).drafter / IMPORT_FILE).touch()  # drafts as many tokens as it was published with
    assert '"num_speculative_tokens": 3,' in mine.examine("--serve", "vllm", *own)[1]["served/command"]["sentence"]
    result = CliRunner().invoke(cli.app, ["doctor", str(tmp_path / "mine.yaml"), "--serve", "vlm"])
    assert (result.exit_code, "there is no format vlm: did you mean `vllm`?" in result.stderr) == (2, True)
