"""Twenty questions of users of drafter trainers, each answered on one page, at most two links from the README.

The questions are from the issues of SpecForge, speculators, EAGLE, Medusa and vLLM; the page holds the answer's key
words.
"""

import re
from pathlib import Path

import pytest
from support.places import ROOT

# The question, the page that answers it, and words that its answer cannot do without.
QUESTIONS = [
    ("Which drafter should I train?", "guides/choose.md", ["the most tokens a round", "prompt_lookup"]),
    ("How much data do I need?", "guides/data.md", ["How many conversations are enough?", "train_answer_tokens"]),
    ("Why must the target answer the conversations itself?", "guides/data.md", ["The target answers every turn"]),
    ("How do I keep Qwen3 from thinking while it is distilled?", "guides/data.md", ["chat_template_kwargs"]),
    ("Can I train on tool calls?", "guides/data.md", ["tool_calls", "role `tool`"]),
    ("My served target is quantised: FP8, AWQ, GPTQ.", "guides/scaling.md", ["data.distill.model", "GPTQ"]),
    ("How do I train with several GPUs?", "guides/scaling.md", ["accelerate launch", "global_batch_size"]),
    ("The target does not fit into one GPU.", "guides/scaling.md", ["data.features.sharded=true", "nf4"]),
    ("Training runs out of memory.", "guides/troubleshooting.md", ["--memory-gib"]),
    ("How long will it take?", "guides/train.md", ["draftsmith plan"]),
    ("It was interrupted: how do I go on?", "guides/training.md", ["checkpoint"]),
    ("Why is the acceptance length so low?", "guides/troubleshooting.md", ["tau"]),
    ("Accepted drafts, and yet it is not faster: why?", "guides/troubleshooting.md", ["the speedup is below 1"]),
    ("How do I serve it in vLLM or SGLang?", "guides/serving.md", ["--speculative-config", "SGLang"]),
    ("How do I run it in llama.cpp?", "guides/llamacpp.md", ["gguf", "llama-server"]),
    ("Is it lossless with sampling, and how do you know?", "concepts/lossless.md", ["temperature", "distribution"]),
    ("What exactly are tau and speedup?", "concepts/metrics.md", ["A **round** is", "over_tasks"]),
    ("Can I measure or go on from a published drafter?", "guides/publishing.md", ["drafter: user/repo"]),
    ("How do I try a loss or a head of my own?", "guides/write-a-drafter.md", ["one file"]),
    ("Can the drafter learn from what I serve?", "guides/use.md", ["--learn", "--rollback"]),
]
MOST_CLICKS = 2


def links_of(page: Path) -> set[Path]:
    found = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in found if not link.startswith("http")}


@pytest.fixture(scope="module")
def reached() -> set[Path]:
    pages = {ROOT / "README.md"}
    for _ in range(MOST_CLICKS):
        pages |= {link for page in pages if page.is_file() for link in links_of(page)}
    return pages


@pytest.mark.parametrize(("question", "page", "words"), QUESTIONS)
def test_a_question_is_answered(question: str, page: str, words: list[str], reached: set[Path]) -> None:
    place = (ROOT / "docs" / page).resolve()
    assert place in reached, question
    text = " ".join(place.read_text(encoding="utf-8").split()).lower()
    assert [word for word in words if " ".join(word.split()).lower() not in text] == [], question
