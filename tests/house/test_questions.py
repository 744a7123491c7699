"""Users' questions about training drafters are answered on one or two pages, at most two links from the README.

Twenty are from the issues of SpecForge, speculators, EAGLE, Medusa and vLLM, twelve from newcomers with their own
model; the page has the key words of the answer.
"""

import re
from pathlib import Path

import pytest
from support.places import ROOT

# The pages that answer a question, with necessary words of the answer.
QUESTIONS: dict[str, dict[str, list[str]]] = {
    "Which drafter should I train?": {"guides/choose.md": ["the most tokens a round", "prompt_lookup"]},
    "How much data do I need?": {"guides/data.md": ["How many conversations are enough?", "train_answer_tokens"]},
    "Why must the target answer the conversations itself?": {"guides/data.md": ["The target answers every turn"]},
    "How do I keep Qwen3 from thinking while it is distilled?": {"guides/data.md": ["chat_template_kwargs"]},
    "Can I train on tool calls?": {"guides/data.md": ["tool_calls", "role `tool`"]},
    "My served target is quantised: FP8, AWQ, GPTQ.": {"guides/scaling.md": ["data.distill.model", "GPTQ"]},
    "How do I train with several GPUs?": {"guides/scaling.md": ["accelerate launch", "global_batch_size"]},
    "The target does not fit into one GPU.": {"guides/scaling.md": ["data.features.sharded=true", "nf4"]},
    "Training runs out of memory.": {"guides/troubleshooting.md": ["--memory-gib"]},
    "How long will it take?": {"guides/train.md": ["draftsmith plan"]},
    "It was interrupted: how do I resume?": {"guides/training.md": ["checkpoint"]},
    "Why is the acceptance length so low?": {"guides/troubleshooting.md": ["tau"]},
    "Accepted drafts, and yet it is not faster: why?": {"guides/troubleshooting.md": ["the speedup is below 1"]},
    "How do I serve it in vLLM or SGLang?": {"guides/serving.md": ["--speculative-config", "SGLang"]},
    "How do I run it in llama.cpp?": {"guides/llamacpp.md": ["gguf", "llama-server"]},
    "Is it lossless with sampling, and how do you know?": {"concepts/lossless.md": ["temperature", "distribution"]},
    "What exactly are tau and speedup?": {"concepts/metrics.md": ["A **round** is", "over_tasks"]},
    "Can I measure or train a published drafter further?": {"guides/publishing.md": ["drafter: user/repo"]},
    "How do I try a loss or a head of my own?": {"guides/write-a-drafter.md": ["one file"]},
    "Can the drafter learn from what I serve?": {"guides/use.md": ["--learn", "--rollback"]},
    "A fine-tuned Qwen3-8B, in vLLM": {
        "guides/train.md": ["cp recipes/qwen3-8b-dflash2.yaml", "A fine-tuned target", "export mine.yaml --to vllm"],
    },
    "How much memory and time does an 8B model take?": {
        "guides/train.md": ["plan mine.yaml --processes 8 --memory-gib 80"],
        "guides/scaling.md": ["| 8B | DDP | 29.0"],
    },
    "A drafter for SGLang": {"guides/choose.md": ["*vLLM, SGLang or llama.cpp will serve it*: `dflash2`"]},
    "How does it resume?": {"guides/train.md": ["Every command may be interrupted: the same command resumes"]},
    "Curves in wandb": {"guides/training.md": ["pip install draftsmith[wandb]", "train.report_to=wandb"]},
    "Eight GPUs with DeepSpeed": {
        "guides/scaling.md": [
            "pip install draftsmith[deepspeed]", "recipes/accelerate/zero2.yaml", "--num_processes 8",
        ],
    },
    "Upload to the Hub": {"guides/publishing.md": ["draftsmith push mine.yaml --dry-run", "hf auth login"]},
    "The speedup is below 1": {"guides/troubleshooting.md": ["speedup is below 1", "draft"]},
    "What exactly is tau?": {"concepts/metrics.md": ["mean tokens committed per round *including* the one"]},
    "My own data format": {"guides/data.md": ["data.conversations.columns={prompt: q}"]},
    "The target is a LoRA adapter": {"guides/train.md": ["A LoRA adapter", "merge_and_unload()"]},
    "Two drafters, compared fairly": {
        "guides/train.md": ["draftsmith compare runs/a runs/b"],
        "concepts/metrics.md": ["Ask this of a figure", "paired"],
    },
}  # fmt: skip
MOST_CLICKS = 2


def list_links(page: Path) -> set[Path]:
    found = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in found if not link.startswith("http")}


@pytest.fixture(scope="module")
def reached() -> set[Path]:
    pages = {ROOT / "README.md"}
    for _ in range(MOST_CLICKS):
        pages |= {link for page in pages if page.is_file() for link in list_links(page)}
    return pages


@pytest.mark.parametrize("question", QUESTIONS)
def test_question_is_answered(question: str, reached: set[Path]) -> None:
    assert len(QUESTIONS[question]) <= 2
    for page, words in QUESTIONS[question].items():
        place = (ROOT / "docs" / page).resolve()
        assert place in reached
        text = " ".join(place.read_text(encoding="utf-8").split()).lower()
        assert [word for word in words if " ".join(word.split()).lower() not in text] == []
