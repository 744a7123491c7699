"""Exports in a real llama-server: each kind loads, changes no greedy token, and accepts as many drafts as our decoder.

The drafters are trained for a moment on the very answers that they are measured on: enough that every depth is accepted
now and then. An answer is compared up to its first numerical tie.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.gguf_target import embedded_gguf
from support.served_drafters import IN_LLAMACPP, NEW_TOKENS, Setup, briefly_trained, our_counts

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.serving.llama_server import Complete, LlamaAnswer, find_server, llama_server
from draftsmith.models.formats.exporting import GgufTarget, export_drafter
from draftsmith.models.formats.llamacpp import FILE
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import TargetRecipe

SERVER = find_server(None)
pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(SERVER is None, reason="there is no llama-server: make llamacpp-env"),
]
QUESTIONS, LONGEST_DRAFT, CONTEXT_TOKENS = 12, 3, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llamacpp")


@pytest.fixture(scope="module")
def setup(folder: Path) -> Setup:
    target, tokenizer = load_target(TargetRecipe(model="embedded", dtype="float32", device="cpu"))
    embedded_gguf(folder, target, tokenizer)
    asked = [question.turns[0] for question in load_questions("embedded")][:QUESTIONS]
    prompts = [prompt_token_ids(tokenizer, [Turn("user", text)]) for text in asked]
    with served(folder) as complete:
        answers = [complete(prompt, NEW_TOKENS + LONGEST_DRAFT + 1).ids for prompt in prompts]
    return Setup(target, prompts, answers)


@contextmanager
def served(folder: Path, *drafting: str) -> Iterator[Complete]:
    assert SERVER is not None
    with llama_server(SERVER, folder / "target.gguf", 1, CONTEXT_TOKENS, drafting, ends=False) as complete:
        yield complete


def test_the_target_is_ours(setup: Setup) -> None:
    """Token by token the most likely one of our target but the end, or as likely up to rounding."""
    for prompt, answer in zip(setup.prompts, setup.answers, strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = setup.target(input_ids=ids).logits[0, len(prompt) - 1 : -1].clone()
        logits[:, setup.target.generation_config.eos_token_id] = float("-inf")
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert float((logits.max(-1).values - chosen).max()) < 1e-3


@pytest.mark.parametrize("name", IN_LLAMACPP)
def test_served_as_in_our_decoder(name: str, setup: Setup, folder: Path, tmp_path: Path) -> None:
    kind, options = IN_LLAMACPP[name]
    drafter = briefly_trained(kind, options, setup.target, setup.prompts, setup.answers)
    target = folder / "target.gguf"
    made = export_drafter(drafter, "gguf", tmp_path / "served", str(target), tmp_path, (), GgufTarget(target, "f32"))
    assert made.command is not None
    words = made.command.split()
    drafting = words[words.index("--model-draft") :]
    assert drafting[1] == str(tmp_path / "served" / FILE)
    with served(folder, *drafting) as complete:
        answers: list[LlamaAnswer] = [complete(prompt, NEW_TOKENS) for prompt in setup.prompts]
    assert [answer.ids for answer in answers] == [answer[:NEW_TOKENS] for answer in setup.answers]
    _, accepted, drafted = our_counts(drafter, setup, within=True)
    assert min(accepted) > 0
    assert [sum(a.accepted for a in answers), sum(a.drafted for a in answers)] == [sum(accepted), drafted]
