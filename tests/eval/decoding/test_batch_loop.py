"""Batched decoding: every row's answer is the one that the prompt gets alone."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.half_right import BUILDERS, GREEDY, GROWERS, TINY, HalfRightDecoder, HalfRightStepwiseDecoder
from support.tiny_models import tiny_drafter_of, tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.batch_loop import generate_batch
from draftsmith.eval.decoding.batch_session import BatchSession
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.lookahead import Lookahead
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.trees.builders import TreeBuilder, tree_builder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodRecipe

PROMPTS = [[5, 6, 7, 8], [90, 3], [11, 12, 13, 14, 15, 16, 17], [40], [5, 6, 7, 9], [60, 61, 62]]
NEW_TOKENS = 24


def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(TINY[name]).to(dtype).eval()


def alone(target: Any, prompts: list[list[int]], new_tokens: int, end_ids: Any = ()) -> list[list[int]]:
    """Greedy answers, one at a time."""
    with TargetSession(target, 64) as session:
        return [generate(session, Autoregressive(), ids, GREEDY, new_tokens, end_ids).ids for ids in prompts]


class Knowing:
    """A half-right drafter for whichever prompt its row is given next."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], decoder_of: Any, builder: TreeBuilder) -> None:
        self.name = "knowing"
        self._answers, self._decoder_of, self._builder = answers, decoder_of, builder

    def start(self, prompt_ids: list[int], features: torch.Tensor) -> None:
        decoder = self._decoder_of(self._answers[tuple(prompt_ids)], 97)
        self._method = DrafterMethod("x", decoder, self._builder, GREEDY)
        self._method.start(prompt_ids, features)

    def propose(self) -> Any:
        return self._method.propose()

    def observe(self, committed_ids: list[int], features: torch.Tensor) -> None:
        self._method.observe(committed_ids, features)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TINY)
def test_greedy_identity(name: str, dtype: torch.dtype) -> None:
    """Six prompts through three rows: ragged prompts, ragged acceptance, rows that come and go."""
    target = tiny(name, dtype)
    wanted = alone(target, PROMPTS, NEW_TOKENS)
    answers = {tuple(ids): answer for ids, answer in zip(PROMPTS, wanted, strict=True)}
    with BatchSession(target, 64, batch_size=3) as session:
        plain = generate_batch(session, [Autoregressive() for _ in range(3)], PROMPTS, GREEDY, NEW_TOKENS)
        assert [out.ids for out in plain] == wanted
        for tree, builder in BUILDERS.items():
            methods = [Knowing(answers, HalfRightDecoder, builder) for _ in range(3)]
            outs = generate_batch(session, methods, PROMPTS, GREEDY, NEW_TOKENS)
            assert [out.ids for out in outs] == wanted, tree
            assert all(out.rounds < NEW_TOKENS - 1 for out in outs), f"{tree}: no draft was accepted"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_grown_trees_side_by_side(name: str) -> None:
    """Rows of one batch may use different methods."""
    target = tiny(name)
    wanted = alone(target, PROMPTS, NEW_TOKENS)
    answers = {tuple(ids): answer for ids, answer in zip(PROMPTS, wanted, strict=True)}
    methods: list[Method] = [Knowing(answers, HalfRightStepwiseDecoder, grower) for grower in GROWERS.values()]
    methods += [PromptLookup("pld"), Lookahead("lookahead"), Autoregressive()]
    with BatchSession(target, 64, batch_size=len(methods)) as session:
        outs = generate_batch(session, methods, PROMPTS * 3, GREEDY, NEW_TOKENS)
        assert [out.ids for out in outs] == wanted * 3


def test_end_tokens_and_limits() -> None:
    """Answers of 1 token up to the limit, cut exactly where they are alone, with the same accepted lengths."""
    target = tiny("llama")
    answers = alone(target, PROMPTS, NEW_TOKENS)
    end_ids = {answers[0][5], answers[1][0], answers[2][11]}
    known = {tuple(ids): answer for ids, answer in zip(PROMPTS, answers, strict=True)}
    wanted = alone(target, PROMPTS, NEW_TOKENS, end_ids)
    assert len({len(ids) for ids in wanted}) > 2
    with BatchSession(target, 64, batch_size=4) as session:
        for limit in (NEW_TOKENS, 3, 1):
            methods = [Knowing(known, HalfRightDecoder, BUILDERS["chain"]) for _ in range(4)]
            outs = generate_batch(session, methods, PROMPTS, GREEDY, limit, end_ids)
            assert [out.ids for out in outs] == [ids[:limit] for ids in wanted]
            assert all(sum(out.accept_lengths) == len(out.ids) - 1 for out in outs)
            assert session.lengths_tokens == []
            assert all(out.wall_time_s >= out.prefill_s + out.draft_s + out.verify_s > 0 for out in outs)


def figures(out: AnswerRecord) -> dict[str, Any]:
    """All of an answer's but its times."""
    return {key: value for key, value in asdict(out).items() if not key.endswith("_s")}


@pytest.mark.parametrize("rows", [1, 3])
def test_every_figure_is_the_one_of_the_loop_for_one(rows: int) -> None:
    """Six prompts through the rows and one by one; the phases are the parts of each row's rounds."""
    target = tiny("llama")
    answers = alone(target, PROMPTS, NEW_TOKENS)
    end_ids = {answers[0][9], answers[1][0]}
    known = {tuple(ids): answer for ids, answer in zip(PROMPTS, answers, strict=True)}
    with TargetSession(target, 64) as single, BatchSession(target, 64, rows) as batch:
        for builder in BUILDERS.values():
            method = Knowing(known, HalfRightDecoder, builder)
            wanted = [generate(single, method, prompt, GREEDY, NEW_TOKENS, end_ids) for prompt in PROMPTS]
            methods = [Knowing(known, HalfRightDecoder, builder) for _ in range(rows)]
            outs = generate_batch(batch, methods, PROMPTS, GREEDY, NEW_TOKENS, end_ids)
            assert [figures(out) for out in outs] == [figures(out) for out in wanted]
            assert sum(out.tried for out in outs) > 20
            for out in (*wanted, *outs):
                assert len(out.round_s) == len(out.draft_depths) == out.rounds
                assert sum(out.round_s) == pytest.approx(out.draft_s + out.verify_s + out.choose_s + out.commit_s)
                assert 0 < out.first_token_s < out.prefill_s <= out.wall_time_s - sum(out.round_s)


@pytest.mark.parametrize("tree", ["chain", "static", "best_first"])
@pytest.mark.parametrize("kind", ["parallel", "medusa", "eagle"])
def test_sampled_answers_do_not_depend_on_the_batch(kind: str, tree: str) -> None:
    """Each prompt's own seed gives the tokens that it gives alone, whichever row it gets. fp64: p is the same."""
    target = tiny_target().double()
    drafter = tiny_drafter_of(kind, target).double()
    paths = [[0], [1], [0, 0], [0, 1], [1, 0]] if tree == "static" else None
    recipe = MethodRecipe.model_validate({"name": "x", "tree": tree, "paths": paths, "nodes": 7, "branch": 3})
    sampling = Sampling(0.7, top_p=0.95)
    prompts = [[token % 61 for token in ids] for ids in PROMPTS]
    seeds = list(range(100, 100 + len(prompts)))

    def method(decoder: Any, generator: torch.Generator) -> Method:
        return DrafterMethod("x", decoder, tree_builder(recipe, decoder), sampling, generator)

    wanted: list[AnswerRecord] = []
    with TargetSession(target, 64, drafter.feature_layers) as session:
        generator = torch.Generator()
        single = method(drafter.decoder(64), generator)
        for prompt, seed in zip(prompts, seeds, strict=True):
            wanted.append(generate(session, single, prompt, sampling, 20, (), generator.manual_seed(seed)))
    generators = [torch.Generator() for _ in range(3)]
    with BatchSession(target, 64, 3, drafter.feature_layers) as batch:
        decoders = [drafter.decoder(64) for _ in range(3)]
        methods = [method(*pair) for pair in zip(decoders, generators, strict=True)]
        outs = generate_batch(batch, methods, prompts, sampling, 20, (), generators, seeds)
    assert [figures(out) for out in outs] == [figures(out) for out in wanted]
    assert len({tuple(out.ids) for out in outs}) == len(prompts)


def test_what_cannot_be_decoded_is_refused() -> None:
    target = tiny("llama")
    with BatchSession(target, 20, batch_size=2) as session:
        with pytest.raises(UserError, match="prompt of 4 tokens and an answer of 17 do not fit into a session of 20"):
            generate_batch(session, [Autoregressive()], PROMPTS, GREEDY, 17)
        with pytest.raises(ValueError, match="3 methods for a session of 2 rows"):
            generate_batch(session, [Autoregressive() for _ in range(3)], PROMPTS, GREEDY, 4)
        with pytest.raises(UserError, match="prompt of 21 tokens does not fit"):
            session.add([1] * 21)
    window = AutoModelForCausalLM.from_config(MistralConfig(**sizes(), sliding_window=16)).eval()
    with pytest.raises(UserError, match="17 tokens do not fit into the target's 16 positions"):
        BatchSession(window, 17, batch_size=2)


def test_a_rotation_that_other_rows_change_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    target = AutoModelForCausalLM.from_config(LlamaConfig(**sizes(), rope_parameters=rope)).eval()
    BatchSession(target, 32, batch_size=2).close()
    with pytest.raises(UserError, match="RoPE \\(longrope\\) changes beyond 32 tokens"):
        BatchSession(target, 33, batch_size=2)
    assert not target.base_model._forward_hooks


def sizes() -> dict[str, Any]:
    return {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
