"""Answers of a target with a drafter, for scripts and notebooks, by the decoding loop that the commands measure.

For example, on the embedded target:

    target, tokenizer = load_target(TargetRecipe(model="embedded"))
    tree = MethodConfig(name="tree", tree="best_first", nodes=12, branch=4)
    with SpeculativeDecoder(target, tokenizer, load_drafter("runs/quickstart/drafter", target), tree) as decoder:
        print(decoder.ask("What does os.path.join do?").text)
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.eval.bench.measured_methods import Arm, compile_decoder
from draftsmith.eval.decoding.generate import AnswerRecord, Round
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.schema import MethodConfig

DEFAULT_LENGTH_TOKENS = 1024
CHAIN = MethodConfig(name="chain")


class SpeculativeDecoder:
    """Decoder of one prompt at a time. Greedy answers equal the target's, sampled ones have its distribution.

    On a CPU the frozen weights are packed into a copy that takes as much memory again, as in `draftsmith eval`.

    Args:
        tokenizer: The target's tokenizer. None: prompts are token ids, and only the limit ends an answer.
        drafter: Drafter that is attached to this target. None: autoregressive decoding in the same loop.
        tree: Shape of the draft trees, by the keys of a method in a recipe's `eval.methods`.
        max_length_tokens: Most tokens of a prompt with its answer; by default 1024, or the target's limit if it is
            lower.
        seed: Seed of sampled answers.

    Raises:
        UserError: The target cannot be decoded with trees, or the tree is invalid.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Any | None,
        drafter: Drafter | None = None,
        tree: MethodConfig = CHAIN,
        sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
        max_length_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(() if tokenizer is None else answer_end_ids(target.generation_config, tokenizer))
        length = max_length_tokens or session_tokens(target, DEFAULT_LENGTH_TOKENS)
        for model in (target, drafter):
            if model is not None:
                pack_linears(model)
        generator = torch.Generator(target.device).manual_seed(seed)
        self.arm = Arm(Autoregressive(), sampling, generator, lenience=tree.lenience)
        self.session = open_session(target, length, compiles=None)
        if drafter is not None:
            decoder = compile_decoder(drafter.decoder(length), target.device, compiles=None)
            method = build_tree_drafter(tree, decoder, sampling, generator)
            self.arm = Arm(method, sampling, generator, drafter.feature_layers, tree.lenience)

    def ask(
        self, question: str, max_new_tokens: int = 128, on_round: Callable[[Round], None] | None = None
    ) -> AnswerRecord:
        """Answer one question, put into the target's chat template; the answer is the result's `text`."""
        if self.tokenizer is None:
            raise ValueError("ask() needs a tokenizer with a chat template: pass `tokenizer`, or call answer() on ids")
        record = self.answer(prompt_token_ids(self.tokenizer, [Turn("user", question)]), max_new_tokens, on_round)
        record.text = self.tokenizer.decode(record.ids, skip_special_tokens=True).strip()
        return record

    def answer(
        self, prompt_ids: list[int], max_new_tokens: int, on_round: Callable[[Round], None] | None = None
    ) -> AnswerRecord:
        """Answer a prompt that is given as token ids.

        Args:
            on_round: Called after every round with its tree, its accepted nodes and the target's logits.

        Raises:
            UserError: Prompt and answer are longer than `max_length_tokens`.
        """
        self.session.check_room(prompt_ids, max_new_tokens)
        return self.arm.answer(self.session, prompt_ids, max_new_tokens, self.end_ids, on_round=on_round)

    def close(self) -> None:
        """Close the session on the target."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
