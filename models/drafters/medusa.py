"""Medusa (arXiv 2401.10774): K heads that read the target's last hidden state, the target frozen (Medusa-1).

Head d of group t reads h_{t-1}, from which the target's own LM head made x_t, and predicts x_{t+d}:
q_d = softmax(W_d r_d(h_{t-1})), r_d a stack of residual blocks x + SiLU(A x + b). A and b start at zero and W_d at the
target's LM head, so that each head starts as the target's own. (The paper's code leaves b at torch's random start.)

Where we deviate: the loss of depth d is averaged over its own labels and weighted with lambda_d / sum(lambda), lambda_d
= 0.8**(d-1); the paper's sum of lambda_d = 0.8**d times mean losses differs from it by a factor.

Heads are independent of each other's tokens and of every architecture: no layers of the target's kind, no cache.

Shapes: B batch, S sequence, G heads = depths, N labelled rows of a depth, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, Drafter, DrafterConfig
from draftsmith.models.base.options import normalized_weights, one_of, whole_number
from draftsmith.models.compiling import BACKEND, compiled
from draftsmith.models.decoding.batch import BatchDecoder
from draftsmith.models.decoding.protocols import SequenceDecoder
from draftsmith.models.groups.alignment import IGNORED_LABEL, depth_labels, previous_features
from draftsmith.models.losses import LOSSES, DrafterOutput, head_loss
from draftsmith.recipes.errors import UserError

LM_HEADS = ("separate", "shared")


class MedusaConfig(DrafterConfig):
    """Options of Medusa, the keys of `drafter.options` in a recipe.

    Args:
        num_heads: G; a round drafts G tokens.
        num_layers: Residual blocks of a head.
        lm_heads: `separate` gives each head an LM head of its own (the paper); `shared` borrows the target's frozen
            one, which leaves only the blocks to train.
        loss: A name in `losses.LOSSES`.
        depth_weights: lambda_d, G numbers; or one number x for lambda_d = x**(d-1).
    """

    model_type = MODEL_TYPE_PREFIX + "medusa"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_heads: int = 5,
        num_layers: int = 1,
        lm_heads: str = "separate",
        loss: str = "ce",
        depth_weights: float | list[float] = 0.8,
        **kwargs: Any,
    ) -> None:
        super().__init__(target_config=target_config, target_name_or_path=target_name_or_path, **kwargs)
        self.num_heads = whole_number("num_heads", num_heads, at_least=1)
        self.num_layers = whole_number("num_layers", num_layers, at_least=1)
        self.lm_heads = one_of("lm_heads", lm_heads, LM_HEADS)
        self.loss = one_of("loss", loss, tuple(LOSSES))
        self.depth_weights = depth_weights
        self.resolved_depth_weights()

    @property
    def num_depths(self) -> int:
        """G, the tokens drafted in one forward."""
        return self.num_heads

    def resolved_depth_weights(self) -> list[float]:
        """lambda_1..lambda_G, normalised to sum 1."""
        return normalized_weights("depth_weights", self.depth_weights, self.num_depths)


class ResidualBlocks(nn.Module):
    """x + SiLU(A x + b), `num_layers` times."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaDrafter(Drafter):
    """The drafter q; see the module's docstring."""

    config_class = MedusaConfig
    base_model_prefix = "drafter"
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.build(config)
        self.post_init()

    def build(self, config: MedusaConfig) -> None:
        """Make the parameters."""
        hidden_size, vocabulary = (config.target_config[key] for key in ("hidden_size", "vocab_size"))
        self.blocks = nn.ModuleList(ResidualBlocks(hidden_size, config.num_layers) for _ in range(config.num_heads))
        if config.lm_heads == "separate":
            own_heads = (nn.Linear(hidden_size, vocabulary, bias=False) for _ in range(config.num_heads))
            self.lm_heads = nn.ModuleList(own_heads)

    @torch.no_grad()
    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Every head starts as the target's own LM head.

        Raises:
            UserError: That has a bias, which heads of our own do not have.
        """
        self.to(torch.promote_types(target.dtype, torch.float32))
        for parameter in self.blocks.parameters():
            parameter.zero_()
        if self.config.lm_heads == "separate":
            source = target.get_output_embeddings()
            if source.bias is not None:
                raise UserError(
                    "the target's LM head has a bias, so Medusa's own heads cannot start as it: use "
                    "drafter.options.lm_heads=shared"
                )
            for parameter in self.lm_heads.parameters():
                parameter.copy_(source.weight)

    # ---- training: all groups of a sequence at once ----

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
    ) -> DrafterOutput:
        """The training loss.

        Args:
            input_ids: [B, S], padded on the right if at all.
            features: [B, S, D] of the target, AT each token; also the teacher's, where the loss has one.
            loss_mask: [B, S], 1 at tokens that may be predicted.
            attention_mask: Not needed: heads see one position.
            position_ids: [B, S] of packed documents, which each start anew at 0; else not needed.
            teacher_features: Not needed.
        """
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_depths)
        previous_bsd = previous_features(features, position_ids)
        results = []
        for j, weight in enumerate(self.config.resolved_depth_weights()):
            batch_n, position_n = (labels_bgs[:, j] != IGNORED_LABEL).nonzero(as_tuple=True)
            result = head_loss(
                self.blocks[j](previous_bsd[batch_n, position_n].to(self.dtype)),
                self.lm_head_of(j),
                labels_bgs[batch_n, j, position_n],
                torch.full_like(batch_n, weight / max(len(batch_n), 1), dtype=torch.float32),
                loss=self.config.loss,
                teacher_nd=features[batch_n, position_n + j],  # h_{t+j} predicts x_{t+1+j}
                teacher_head=self.attached.lm_head,
            )
            results.append(result)
        return DrafterOutput(
            loss=torch.stack([result.loss for result in results]).sum(),
            depth_loss_sum=torch.stack([result.cross_entropy_n.sum() for result in results]),
            depth_correct=torch.stack([result.correct_n.sum() for result in results]),
            depth_count=torch.tensor([len(result.losses_n) for result in results], device=features.device),
        )

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.logits_of(previous_features(features, position_ids)).movedim(0, 1)

    # ---- shared by training and decoding ----

    def lm_head_of(self, j: int) -> nn.Module:
        """The linear layer [V, D] for depth j+1."""
        return self.lm_heads[j] if self.config.lm_heads == "separate" else self.attached.lm_head

    def logits_of(self, previous: Tensor) -> Tensor:
        """h_{t-1} [..., D] -> [G, ..., V] of all heads."""
        hidden = torch.stack([blocks(previous.to(self.dtype)) for blocks in self.blocks])
        if self.config.lm_heads == "shared":
            lm_head: Any = self.attached.lm_head
            return lm_head(hidden.to(lm_head.weight.dtype))  # one product
        return torch.stack([lm_head(part) for lm_head, part in zip(self.lm_heads, hidden, strict=True)])

    def decoder(self, max_length_tokens: int) -> "MedusaDecoder":
        return MedusaDecoder(self)

    def batch_decoders(self, max_length_tokens: int, batch_size: int) -> Sequence[SequenceDecoder]:
        return MedusaBatchDecoder(self, batch_size).rows


class MedusaDecoder:
    """Keeps h_{t-1} and nothing else; see `draftsmith.models.decoding.protocols.DrafterDecoder`."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        self._drafter, self._logits_of = drafter, drafter.logits_of
        self._previous_d: Tensor | None = None

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the heads."""
        self._logits_of = compiled(self._drafter.logits_of, self._drafter.device, "Medusa", backend)

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence: features [P, D] are those AT the prompt's tokens."""
        self._previous_d = previous_features(features.unsqueeze(0))[0, -1]

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Features [n, D] predicted the n new tokens: the last of them is h_{t-1}."""
        if len(committed_ids):
            self._previous_d = features[-1]

    @torch.inference_mode()
    def draft(self) -> Tensor:
        """fp32 logits [G, V] of depths 1..G after the newest committed token."""
        if self._previous_d is None:
            raise ValueError("drafting needs a sequence: call start() first")
        # Rows of their own: one compiled shape, wherever in the target's features they were.
        return self._logits_of(self._previous_d.clone()).float()


class MedusaBatchDecoder(BatchDecoder):
    """The same for several rows, whose heads run together."""

    def __init__(self, drafter: MedusaDrafter, batch_size: int) -> None:
        super().__init__(batch_size)
        self._drafter = drafter
        self._previous_d: list[Tensor] = [torch.empty(0)] * batch_size

    def start(self, row: int, prompt_ids: Tensor, features: Tensor, position_offset: int) -> None:
        super().start(row, prompt_ids, features, position_offset)
        self._previous_d[row] = previous_features(features.unsqueeze(0))[0, -1]

    def observe(self, row: int, committed_ids: Tensor, features: Tensor) -> None:
        super().observe(row, committed_ids, features)
        if len(committed_ids):
            self._previous_d[row] = features[-1]

    def _draft(self, due: list[int]) -> dict[int, Tensor]:
        logits_gav = self._drafter.logits_of(torch.stack([self._previous_d[row] for row in due])).float()
        return dict(zip(due, logits_gav.unbind(1), strict=True))


DRAFTER = MedusaDrafter
