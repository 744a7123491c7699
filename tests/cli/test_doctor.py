"""`draftsmith doctor`: each real defect is found and reported, with exit code 1."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_tokenizers as templates
from support.tiny_models import long_rope
from support.tiny_runs import recipe_file, recipe_in
from support.tiny_tokenizers import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from draftsmith.cli import doctor
from draftsmith.cli import main as cli
from draftsmith.data.engines import vllm_engine
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.models.decoding.decoders import ParallelDecoder

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
        command = ["doctor", str(self.folder / "mine.yaml"), *overrides, f"--rows={rows}", "--json"]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code in (0, 1), result.output
        values = json.loads(result.stdout)
        assert values["healthy"] == (result.exit_code == 0)
        findings = {f"{entry['part'].split()[0]}/{entry['check']}": entry for entry in values["findings"]}
        assert len(findings) == len(values["findings"])
        for entry in values["findings"]:
            assert entry["sentence"] in result.stderr
        return result.exit_code, findings, result.stderr


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
    assert findings["drafter/engines"]["sentence"].startswith("vLLM can load this drafter; not SGLang: ")
    assert "0 defects, 0 warnings\n" in printed
    assert {entry["severity"] for entry in findings.values()} == {"ok"}
    rows = tokenized(tiny_tokenizer(templates.CHATML), TALK)
    tokens, loss = sum(len(row.input_ids) for row in rows), sum(sum(row.loss_mask) for row in rows)
    counted = f"3 examples, {tokens} tokens ({loss} of the assistant) in a sample of the source"
    assert findings["source/examples"]["sentence"] == counted
    assert "training and decoding agree after" in findings["drafter/train = decode"]["sentence"]
    assert "«Hello there Hello there Hello there Hello there <|im_end|>»\n" in printed
    assert "Next: draftsmith distill" in printed
    assert not (tmp_path / "runs").exists()


SERVED = "data.features={source: server, server: {urls: ['http://h:8000']}}"
# Changes to the folder; overrides; the defect's place; its message.
DEFECTS: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "every token is the assistant's": (
        {"template": "{% for m in messages %}{{ m.content if m.role == 'assistant' }}{% endfor %}"}, [],
        "chat/chat template", "drops or rewrites the question before it .*: set target.chat_template",
    ),
    "the template refuses system turns": (
        {"template": templates.LLAMA2, "source": [*TALK, WITH_SYSTEM]}, [],
        "source/chat template", "fails for 1 of 4 conversations.*skip_invalid=true",
    ),
    "no end token": (
        {"template": templates.NO_END_TOKEN}, [],
        "source/end tokens", "of 3 answers 3 do not end with </s>, so the drafter would not learn to stop",
    ),
    "a turn that is no text": (
        {"source": [*TALK, {"messages": [{"role": "user", "content": 3}]}, {"messages": []}]}, [],
        "source/source", "talk.jsonl line 4, turn 1: .*skip_invalid=true",
    ),
    "too long": (
        {}, ["data.max_length_tokens=8", "data.distill.engine=none"],
        "source/examples", "3 without an example, .*: raise data.max_length_tokens or use shorter conversations",
    ),
    "more tokens than positions": (
        {"max_position_embeddings": 20}, ["data.distill.engine=none"],
        "source/positions", "but the target has 20 positions: set data.max_length_tokens to 20",
    ),
    "a switch of RoPE": (
        {"rope_parameters": long_rope(240)}, ["data.distill.engine=none"],
        "source/source", "is 250, but the target's RoPE .* one beyond 240 tokens: set .* to 240",
    ),
    "no room for answers": (
        {"max_position_embeddings": 64}, ["data.distill.max_new_tokens=60"],
        "source/source",
        r"none of 3 prompts leaves room .*=60 within the target's 64 positions, .* tokens: set .* to \d+ at most,",
    ),
    "an option of no engine": (
        {}, ["data.distill.options={batchsize: 3}"], "distillation/engine", "did you mean `batch_size`",
    ),
    "no such drafter": ({}, ["drafter.kind=paralel"], "drafter/drafter", "use one of .*parallel"),
    "no such option": ({}, ["drafter.options.num_mask=3"], "drafter/drafter", "did you mean `num_masks`"),
    "no such training key": ({}, ["train.learning_rat=1"], "drafter/train section", "did you mean `learning_rate`"),
    "a kind that needs the layers of a served target": (
        {}, [SERVED, "drafter={kind: medusa2}"],
        "drafter/drafter", "`medusa2` cannot be trained on features from disk or servers",
    ),
    "an engine that has no place for the kind": (
        {"num_hidden_layers": 4}, ["--serve=sglang", "drafter={kind: peagle}"],
        "drafter/sglang", "has no place for peagle: train with drafter.kind=eagle3",
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], list[str], str, str]] = {
    "thoughts": (
        "warning", {"template": "{% if enable_thinking %}{% endif %}" + templates.CHATML}, [],
        "chat/thoughts", r"target.chat_template_kwargs=\{enable_thinking: false\}",
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
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_found(name: str, tmp_path: Path) -> None:
    changes, overrides, check, sentence = DEFECTS[name]
    code, findings, printed = clinic(tmp_path, **changes).examine(*overrides)
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


@pytest.mark.parametrize("kind", ["parallel", "dflash2"])
def test_served_target_is_not_loaded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and decoding are compared on random features; dflash2's rounding in fp32 is no defect."""
    monkeypatch.setattr(doctor, "load_target", None)
    code, findings, _ = clinic(tmp_path, num_hidden_layers=4).examine(SERVED, f"drafter={{kind: {kind}}}")
    assert code == 0
    assert "target/draft trees" not in findings


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
    observe = ParallelDecoder.observe
    monkeypatch.setattr(ParallelDecoder, "observe", lambda self, ids, features: observe(self, ids, features.roll(1, 0)))
    code, findings, _ = clinic(tmp_path).examine()
    assert code == 1
    sentence = findings["drafter/train = decode"]["sentence"]
    assert "parallel computes other logits in decoding than in training" in sentence
    assert ParallelDecoder.__module__.removeprefix("draftsmith.").replace(".", "/") in sentence


def test_engine_of_the_drafter(tmp_path: Path) -> None:
    mine = clinic(tmp_path, num_hidden_layers=4)
    _, findings, _ = mine.examine("--serve", "vllm", "drafter.kind=peagle", "drafter.options={}")
    assert "`draftsmith export --to vllm` can write this drafter" in findings["drafter/vllm"]["sentence"]
    assert "drafter.options.first_token=false" in findings["drafter/first token"]["sentence"]
    _, findings, _ = mine.examine("--serve", "vllm", "drafter.kind=parallel", "drafter.options={}")
    assert "with draftsmith in its environment" in findings["drafter/vllm"]["sentence"]
    result = CliRunner().invoke(cli.app, ["doctor", str(tmp_path / "mine.yaml"), "--serve", "vlm"])
    assert (result.exit_code, "there is no format vlm: did you mean `vllm`?" in result.stderr) == (2, True)


def test_distilled_examples_are_read_as_training_reads_them(tmp_path: Path) -> None:
    """Prompts have no examples before."""
    case = clinic(tmp_path, source=[{"prompt": f"Say hi {n}"} for n in range(3)])
    code, findings, printed = case.examine(rows=1)
    assert (code, "source/examples" in findings, "Example 1" in printed) == (0, False, False)
    kept = ("data.distill.max_new_tokens=2", "data.distill.cut_answers=keep")
    assert CliRunner().invoke(cli.app, ["distill", str(tmp_path / "mine.yaml"), *kept]).exit_code == 0
    code, findings, printed = case.examine(*kept, rows=1)
    assert (code, findings["tokens/examples"]["sentence"][:12], "Example 1" in printed) == (0, "3 examples, ", True)


def test_many_lost_records_are_a_warning(tmp_path: Path) -> None:
    case = clinic(tmp_path, source=[TALK[1], TALK[2], TWO_ROUNDS, "{not json", "{}"])
    overrides = ["data.conversations.skip_invalid=true", "data.max_length_tokens=60"]
    code, findings, _ = case.examine(*overrides)
    warnings = {key for key, entry in findings.items() if entry["severity"] == "warning"}
    assert (code, warnings) == (0, {"source/source talk", "source/examples"})
