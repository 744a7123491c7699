"""The embedded target's tokenizer, loss mask, packing, schedule, a tiny run end to end, and the shipped checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from support.places import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data.stdlib.conversations import build_conversations
from draftsmith.recipes.loading import load_yaml_as
from draftsmith.recipes.target_schema import CorpusSection, EmbeddedTargetRecipe, ModelSection, ScheduleSection
from draftsmith.train.drafter.interrupt import StopOnInterrupt
from draftsmith.train.embedded_target.build import build_model, collate, encode, pack_rows, train_tokenizer
from draftsmith.train.embedded_target.card import TargetFigures, has_repeated_ngram, write_target_card
from draftsmith.train.embedded_target.clock import TrainingClock, rate_multiplier
from draftsmith.train.embedded_target.run import train_target

CHECKPOINT = ROOT / "models" / "embedded_target"
TINY = ModelSection(
    vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8,
)  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is `a`?"},
    {"role": "assistant", "content": "It is `b`."},
    {"role": "user", "content": "And `c`?"},
    {"role": "assistant", "content": "That is `d`."},
]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [m["content"] for c in build_conversations(limit=50) for m in c["messages"]]
    return train_tokenizer(texts, TINY)


def test_template_renders_turns(tokenizer):
    assert tokenizer.apply_chat_template(MESSAGES[:3], tokenize=False) == (
        "<|system|>\nBe short.<|end|>\n<|user|>\nWhat is `a`?<|end|>\n<|assistant|>\nIt is `b`.<|end|>\n"
    )
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|end|>\n<|assistant|>\n")


def test_mask_covers_exactly_answers_and_end_tokens(tokenizer):
    ids, mask = encode(tokenizer, MESSAGES)
    marked = tokenizer.decode([token for token, answer in zip(ids, mask, strict=True) if answer])
    assert marked == "It is `b`.<|end|>That is `d`.<|end|>"


def test_prompt_is_a_prefix_of_the_conversation(tokenizer):
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=True, add_generation_prompt=True, return_dict=True)
    whole, _ = encode(tokenizer, MESSAGES)
    assert whole[: len(prompt["input_ids"])] == prompt["input_ids"]


def test_special_tokens_are_distinct_and_there_is_no_bos(tokenizer):
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.bos_token is None
    assert tokenizer("x")["input_ids"] == tokenizer("x", add_special_tokens=False)["input_ids"]


def test_packed_row_equals_its_conversations_alone(tokenizer):
    conversations = [{"messages": MESSAGES}, {"messages": MESSAGES[1:3]}]
    rows = pack_rows(tokenizer, conversations, row_tokens=160, user_token_weight=0.5)
    assert len(rows) == 1
    batch = collate(rows)
    model = build_model(TINY, tokenizer, seed=0).eval()
    with torch.no_grad():
        batch.pop("loss_weights")
        packed = model(**batch, use_cache=False).logits[0]
        for segment, conversation in enumerate(conversations):
            ids, _ = encode(tokenizer, conversation["messages"])
            chosen = torch.tensor(rows[0]["segments"]) == segment
            torch.testing.assert_close(packed[chosen], model(torch.tensor([ids])).logits[0], atol=1e-5, rtol=1e-4)


def test_loss_weights(tokenizer):
    """0 for the first token and padding, 1 for answers, the given weight for everything else."""
    row = pack_rows(tokenizer, [{"messages": MESSAGES}], row_tokens=160, user_token_weight=0.5)[0]
    ids, mask = encode(tokenizer, MESSAGES)
    expected = [0.0] + [1.0 if answer else 0.5 for answer in mask[1:]] + [0.0] * (160 - len(ids))
    assert row["loss_weights"] == expected


def test_rate_ends_at_zero_by_steps_or_by_clock():
    """decay_frac 0.5: 1 until half of the progress, then linear: at three quarters (1 - 0.75) / 0.5 = 0.5."""
    schedule = ScheduleSection(warmup_steps=0, decay_frac=0.5)
    clock = TrainingClock(max_steps=100, max_minutes=10)
    rate = rate_multiplier(clock, schedule)
    assert [rate(0), rate(50), rate(75), rate(100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    clock.elapsed_s = 7.5 * 60
    assert rate(0) == pytest.approx(0.5)
    clock.elapsed_s = 11 * 60
    assert rate(0) == 0.0


def tiny_recipe(folder: Path, epochs: float) -> EmbeddedTargetRecipe:
    return EmbeddedTargetRecipe(
        output_dir=folder / "out",
        work_dir=folder / "work",
        corpus=CorpusSection(limit=40, row_tokens=512, eval_rows=2),
        model=TINY,
        schedule=ScheduleSection(epochs=epochs, warmup_steps=1, rows_per_step=2, compile=False, save_steps=2),
    )


def test_tiny_run_writes_a_loadable_checkpoint(tmp_path):
    note = train_target(tiny_recipe(tmp_path, epochs=1))
    assert note is not None
    assert "steps of 2 rows" in note
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.use_cache
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    assert tokenizer.all_special_tokens == ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    prompt = tokenizer.apply_chat_template(
        MESSAGES[:2], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]
    write_target_card(tmp_path / "out", TargetFigures(2.0, 1000, "tiny", samples=[("q", "a")]), note)
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()


def test_interrupted_run_goes_on(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, epochs=4)
    monkeypatch.setattr(StopOnInterrupt, "on_train_begin", lambda stop, *_, **__: setattr(stop, "requested", True))
    with pytest.raises(KeyboardInterrupt):
        train_target(recipe)
    assert not recipe.output_dir.exists()
    monkeypatch.undo()
    assert train_target(recipe) is not None
    assert (recipe.output_dir / "model.safetensors").exists()


def test_repeated_ngram():
    assert has_repeated_ngram([1, 2, 3, 1, 2, 3], n=3)
    assert not has_repeated_ngram([1, 2, 3, 1, 2, 4], n=3)


def test_shipped_checkpoint_matches_the_recipe():
    recipe = load_yaml_as(EmbeddedTargetRecipe, ROOT / "recipes" / "target.yaml")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    for key, value in recipe.model.model_dump(exclude={"rope_theta"}).items():
        assert config[key] == value, key
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 16 * 1024 * 1024


def test_shipped_checkpoint_loads_and_answers():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model, info = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids, mask = encode(tokenizer, MESSAGES)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).count("<|end|>") == 2
    question = {"role": "user", "content": "List its arguments.\n```python\ndef add(x, y=1):\n    return x + y\n```"}
    prompt = tokenizer.apply_chat_template(
        [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0, prompt["input_ids"].shape[1] :])
    assert "`add` takes 2 arguments" in answer
    assert answer.endswith("<|end|>")
