"""Targets with recurrent layers: a chain that is rejected leaves no trace, and everything but trees works.

The references are `generate` of transformers and forwards without a cache.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from support.half_right import BUILDERS, GREEDY, HalfRightDecoder, greedy_reference
from support.tiny_models import HYBRIDS, VOCABULARY, tiny_target
from support.tiny_runs import recipe_in, save_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.cli.prove import prove
from draftsmith.cli.stages import make_drafter
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.decoding.recurrent import MOST_UNREAD_TOKENS
from draftsmith.models.formats.exporting import export_drafter
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import TargetRecipe

PROMPT = [5, 9, 33, 12, 40, 7]


def chain(*tokens: int) -> DraftTree:
    return DraftTree([*tokens], TreeShape.chain(len(tokens) - 1))


def plain_logits(target: PreTrainedModel, ids: list[int]) -> Tensor:
    return target(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    "name", [name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.nightly) for name in HYBRIDS]
)
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    """Chains are accepted in part, round after round, so that tokens are read again with and without a draft."""
    target, new_tokens = tiny_target(name), 2 * MOST_UNREAD_TOKENS
    with TargetSession(target, len(PROMPT) + new_tokens) as session:
        for prompt in (PROMPT, [3]):
            expected = greedy_reference(target, prompt, new_tokens)
            assert generate(session, Autoregressive(), prompt, GREEDY, new_tokens).ids == expected
            method = TreeDrafter("x", HalfRightDecoder(expected, VOCABULARY), BUILDERS["chain"], GREEDY)
            answer = generate(session, method, prompt, GREEDY, new_tokens)
            assert answer.ids == expected
            assert 0 < answer.accepted_drafts < answer.tried


@pytest.mark.parametrize("name", HYBRIDS)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    """Logits and features of every chain, after rejections of each length and after a chain that nobody committed."""
    target, ids = tiny_target(name), list(PROMPT)
    with TargetSession(target, 64) as session:
        session.prefill(ids)
        for length, accepted in ((4, 1), (3, 2), (4, 4), (1, 1), (4, 1), (2, 1), (1, 1), (3, 3), (4, 2)) * 2:
            tokens = [3 + (7 * len(ids) + place) % 50 for place in range(length)]
            session.forward_tree(chain(50, 51, 52))
            step = session.forward_tree(chain(*tokens))
            expected = plain_logits(target, ids + tokens)[-length:]
            assert torch.allclose(step.logits, expected, atol=1e-4 * float(expected.abs().max())), len(ids)
            features = target_features(target, torch.tensor([ids + tokens]))[0, -length:]
            assert torch.allclose(step.features, features, atol=1e-4 * float(features.abs().max()))
            session.commit([*range(accepted)])
            ids += tokens[:accepted]


def test_single_steps_are_those_of_a_longer_forward(tmp_path: Path) -> None:
    """Time steps shorter than `time_step_min`, which transformers lengthens in longer forwards only."""
    target = tiny_target("nemotron_h", time_step_min=0.05)
    mixers = [module for module in target.modules() if hasattr(module, "time_step_limit")]
    for mixer in mixers:
        mixer.dt_bias.fill_(-9.0)
    target.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCABULARY)
    loaded, _ = load_target(TargetRecipe(model=str(tmp_path), device="cpu", dtype="float32"))
    ids, steps = [PROMPT[0]], []
    with TargetSession(loaded, 32) as session:
        session.prefill(ids)
        for token in (*PROMPT[1:], *PROMPT):
            steps.append(session.forward_tree(chain(token)).logits[0])
            session.commit([0])
            ids.append(token)
    largest = float(torch.stack(steps).abs().max())
    assert torch.allclose(torch.stack(steps), plain_logits(loaded, ids)[1:], atol=1e-5 * largest)
    for mixer in mixers:
        mixer.time_step_limit = (target.config.time_step_min, math.inf)
    assert not torch.allclose(torch.stack(steps), plain_logits(target, ids)[1:], atol=1e-3 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.nightly)])
def test_every_stage(name: str, tmp_path: Path) -> None:
    """Distilled by transformers, trained on features of inner layers, proved and exported."""
    tiny_target(name, num_hidden_layers=4).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target", VOCABULARY)
    talks = [{"messages": [{"role": "user", "content": f"w{number} w{number + 1}"}]} for number in range(4, 10)]
    questions = [{"question_id": number, "category": "writing", "turns": [f"w{number} w6 w7"]} for number in (5, 8)]
    for file, lines in (("talks", talks), ("questions", questions)):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = recipe_in(
        tmp_path,
        data={
            "conversations": {"source": str(tmp_path / "talks.jsonl"), "decontaminate": []},
            "distill": {"engine": "transformers", "max_new_tokens": 12, "cut_answers": "keep"},
            "max_length_tokens": 64, "tokenize_processes": 1,
        },
        drafter={"kind": "eagle3", "options": {"feature_layers": [1, 2, 3]}},
        train={"max_steps": 3, "save_steps": 3},
        eval={
            "questions": str(tmp_path / "questions.jsonl"),
            "methods": [{"name": "eagle3"}, {"name": "lookup", "kind": "prompt_lookup"}],
        },
    )  # fmt: skip
    make_drafter(recipe)
    target = tiny_target(name, num_hidden_layers=4)
    for shard in RunFolder(recipe).data.glob("shards/*.jsonl"):
        for line in map(json.loads, shard.read_text().splitlines()):
            (answer,) = line["answer_ids"]
            prompt = [int(word[1:]) for word in line["messages"][0]["content"].split()]
            assert answer == greedy_reference(target, prompt, len(answer))
    proof = prove(recipe, prompts=2, samples=1, new_tokens=16)
    assert proof.holds
    assert [(greedy.method, greedy.divergences) for greedy in proof.greedy] == [("eagle3", []), ("lookup", [])]
    folder = RunFolder(recipe).drafter
    export_drafter(load_drafter(folder, target), "vllm", tmp_path / "exported", recipe.target.model, folder)
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
