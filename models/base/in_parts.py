"""The loss of a group-wise drafter with the masks of some groups after those of others (`groups/parts.py`).

Exact: a part's loss is differentiated while it is computed, towards the parameters and towards what it reads of stream
0, and forgotten; what has added up is handed on when the whole loss is. So nothing is computed twice, and what lies in
memory is stream 0, one part, and one more gradient of the parameters. (Not under FSDP2 or ZeRO-3, which shard
parameters behind autograd's back.) `torch.compile` leaves it alone: parts have all sorts of shapes.

Shapes: B batch, S sequence, P = B*S tokens, T of them with a place in attention, G streams, K = G-1 masks, N rows of
stream 0, n rows of a part, E input width of a layer, D hidden, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from draftsmith.models.base.depth_weights import DpaceWeights, weighed
from draftsmith.models.groups.alignment import IGNORED_LABEL, previous_features
from draftsmith.models.groups.parts import Part, PartAttention, PartRows, RealStream, parts_of
from draftsmith.models.groups.rows import GroupRows
from draftsmith.models.head_loss import TeacherRows
from draftsmith.models.losses import DrafterOutput, softmax_dtype

# So that a part has about a quarter as many rows as stream 0, however many masks there are.
PARTS_PER_MASK = 4


class PartwiseDrafter(Protocol):
    """What is asked of a drafter; its methods are those of `GroupWiseDrafter`."""

    config: Any

    @property
    def reads_first_token(self) -> bool: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def rows_with_labels(self, labels_bgs: Tensor, position_ids: Tensor | None) -> Tensor: ...

    def labels_read(self, labels_bgs: Tensor) -> Tensor: ...

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor: ...

    def rotary_of(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]: ...

    def run_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor: ...

    def part_state(self, inputs_ne: Tensor, hidden_nd: Tensor) -> Tensor: ...

    def part_hidden(self, part: PartRows, state_ne: Tensor, ids_p: Tensor) -> Tensor: ...

    def label_loss(
        self,
        hidden_nd: Tensor,
        depth_n: Tensor,
        labels_n: Tensor,
        teacher: TeacherRows | None,
        counts_2g: Tensor | None = None,
        previous_n: Tensor | None = None,
        summed: bool = True,
    ) -> DrafterOutput: ...


@dataclass(frozen=True)
class Batch:
    """A step's tensors: `features` as they are read, [B, S, F]; `teacher_features` [B, S, D] or None."""

    input_ids: Tensor
    features: Tensor
    labels_bgs: Tensor
    position_ids: Tensor | None
    teacher_features: Tensor | None

    @property
    def positions(self) -> Tensor:
        """[B, S]."""
        if self.position_ids is None:
            return torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        return self.position_ids.expand_as(self.input_ids)


@torch.compiler.disable
def loss_in_parts(
    drafter: PartwiseDrafter, batch: Batch, present_bgs: Tensor, counts_2g: Tensor | None
) -> DrafterOutput:
    """What `GroupWiseDrafter.forward` gives.

    Args:
        present_bgs: [B, G, S] bool, the rows to compute.
        counts_2g: `label_counts` of the whole batch, by default of these rows.
    """
    labels_bgs, positions_bs = batch.labels_bgs, batch.positions
    real = GroupRows.of(
        present_bgs[:, :1], labels_bgs[:, :1], positions_bs, drafter.reads_first_token, in_documents=True
    )
    if counts_2g is None:
        labelled_bgs = drafter.rows_with_labels(labels_bgs, positions_bs) & present_bgs
        counts_2g = torch.stack([labelled_bgs, labelled_bgs & drafter.labels_read(labels_bgs)]).sum((1, 3)).float()
    masks = _Masks(drafter, batch, present_bgs, real, counts_2g)

    attention = RealStream(real.grid, drafter.config.attention)
    read_pf = previous_features(batch.features, batch.position_ids).flatten(0, 1)
    inputs_ne = drafter.real_inputs(batch.input_ids.flatten(), read_pf).index_select(0, real.token_n)
    rotary = drafter.rotary_of(inputs_ne.unsqueeze(0), positions_bs.flatten()[real.token_n].unsqueeze(0))
    hidden_nd = drafter.run_layers(inputs_ne.unsqueeze(0), rotary, cached_attention=attention)[0]
    labelled_nd = hidden_nd.index_select(0, real.labelled_m)
    token_m = real.token_n[real.labelled_m]
    first = masks.first(labelled_nd, token_m)

    state_ne = drafter.part_state(inputs_ne, hidden_nd)
    shared = [state_ne, *(part for keys_values in attention.keys_values for part in keys_values)]
    # A Function's forward sees that inputs want gradients, but not that nobody asks for them.
    asked = torch.is_grad_enabled()
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad and asked]
    deeper = _InParts.apply(masks.part_loss, masks.parts, masks.scale, len(shared), *shared, *trained)
    loss = masks.first_loss(first, token_m)
    correct = torch.zeros_like(labels_bgs, dtype=torch.bool).transpose(0, 1).flatten(1)  # [G, P]
    for depth_n, token_n, correct_n in masks.found:
        correct[depth_n, token_n] = correct_n
    sums = (sum(cast(Tensor, output[key]) for output in masks.outputs) for key in _SUMS)
    batch_size, _, length = labels_bgs.shape
    correct_bgs = correct.unflatten(1, (batch_size, length)).transpose(0, 1)
    return DrafterOutput(loss + deeper, *sums, correct_bgs=correct_bgs)


_SUMS = ("depth_loss_sum", "depth_correct", "depth_count")


class _Masks:
    """The masks of a step: which there are in each part, and the loss of a part.

    outputs, found: Of what has been taken so far; depth, token and whether it was right.
    """

    def __init__(
        self, drafter: PartwiseDrafter, batch: Batch, present_bgs: Tensor, real: GroupRows, counts_2g: Tensor
    ) -> None:
        self._drafter, self._batch, self._counts_2g = drafter, batch, counts_2g
        labels_bgs, device = batch.labels_bgs, present_bgs.device
        grid, documents = real.grid, real.grid.documents
        assert documents is not None
        self._token_t = cast(Tensor, grid.token_t)
        self._real_t = torch.zeros_like(self._token_t)
        self._real_t[grid.index_n] = torch.arange(len(grid.index_n), device=device)
        masks_bks = present_bgs[:, 1:] & (labels_bgs[:, 1:] != IGNORED_LABEL)
        self._masks_kt = masks_bks.transpose(0, 1).flatten(1)[:, self._token_t]
        self.parts = parts_of(documents, PARTS_PER_MASK * len(self._masks_kt))
        counts = torch.stack([self._masks_kt[:, part.begin : part.end].sum(1) for part in self.parts]).tolist()
        self._counts = {part.begin: counts_k for part, counts_k in zip(self.parts, counts, strict=True)}
        self.parts = [part for part in self.parts if sum(self._counts[part.begin])]
        half = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
        # In fp16 gradients of a mean over many labels would be rounded to zero before the loss scale meets them.
        self.scale = float(max(1, sum(map(sum, counts)))) if half else 1.0
        self.outputs: list[DrafterOutput] = []
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []
        alpha, num_tokens = drafter.config.options.dpace, labels_bgs.shape[0] * labels_bgs.shape[2]
        self._dpace = None if alpha is None else DpaceWeights(alpha, num_tokens, labels_bgs.shape[1])

    def first(self, hidden_nd: Tensor, token_n: Tensor) -> DrafterOutput:
        """Of depth 1, for `first_loss`."""
        output = self.rows(hidden_nd, torch.zeros_like(token_n), token_n)
        if self._dpace is not None:
            self._dpace.begin(cast(Tensor, output.cross_entropy_n), token_n)
        return output

    def first_loss(self, output: DrafterOutput, token_n: Tensor) -> Tensor:
        """[] once all parts have been taken."""
        if self._dpace is not None:
            output = weighed(output, self._dpace.first(token_n), self._counts_2g[0, 0])
        return cast(Tensor, output.loss)

    def part_loss(self, part: Part, shared: tuple[Tensor, ...]) -> Tensor:
        """[] of a part's masks, from stream 0's state and the keys and values of each layer."""
        state_ne, *flat = shared
        drafter, counts_k, size = self._drafter, self._counts[part.begin], part.end - part.begin
        here = slice(part.begin, part.end)
        index_n = self._masks_kt[:, here].flatten().nonzero_static(size=sum(counts_k)).squeeze(1)
        stream_n, place_n = index_n // size + 1, index_n % size
        token_n = self._token_t[here][place_n]
        rows = PartRows(
            stream_n=stream_n,
            place_n=place_n,
            token_n=token_n,
            real_n=self._real_t[here][place_n],
            position_n=self._batch.positions.flatten()[token_n] + stream_n,
            counts_k=counts_k,
            size=size,
            attention=PartAttention(part, list(zip(flat[::2], flat[1::2], strict=True)), drafter.config.attention),
        )
        hidden_nd = drafter.part_hidden(rows, state_ne, self._batch.input_ids.flatten())
        output = self.rows(hidden_nd, stream_n, token_n)
        if self._dpace is not None:
            weights_n = self._dpace.deeper(cast(Tensor, output.cross_entropy_n), token_n, stream_n)
            output = weighed(output, weights_n, self._counts_2g[0, 0])
        return cast(Tensor, output.loss)

    def rows(self, hidden_nd: Tensor, depth_n: Tensor, token_n: Tensor) -> DrafterOutput:
        """Of labelled rows, their loss not summed yet with D-PACE; its sums are kept."""
        batch = self._batch
        length = batch.labels_bgs.shape[2]
        labels_n = batch.labels_bgs[token_n // length, depth_n, token_n % length]
        teacher = None
        if batch.teacher_features is not None:
            teacher = TeacherRows(batch.teacher_features.flatten(0, 1), token_n + depth_n)
        previous_n = batch.input_ids.flatten()[token_n + depth_n]
        given = (hidden_nd, depth_n, labels_n, teacher, self._counts_2g, previous_n)
        label_loss = self._drafter.label_loss
        output = label_loss(*given) if self._dpace is None else label_loss(*given, summed=False)
        self.outputs.append(output)
        self.found.append((depth_n, token_n, cast(Tensor, output.correct_n)))
        return output


class _InParts(torch.autograd.Function):
    """The sum of the parts' losses; their gradients are taken on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        part_loss: Callable[[Part, tuple[Tensor, ...]], Tensor],
        parts: list[Part],
        scale: float,
        num_shared: int,
        *tensors: Tensor,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[4:]
        shared = tuple(
            tensor.detach().requires_grad_(wants) for tensor, wants in zip(tensors[:num_shared], wanted, strict=False)
        )
        inputs = (*shared, *tensors[num_shared:])
        towards = [number for number, wants in enumerate(wanted) if wants]
        grads: list[Tensor | None] = [None] * len(inputs)
        summed = set[int]()  # those that are nobody else's
        total = tensors[0].new_zeros((), dtype=softmax_dtype(tensors[0].dtype))
        for part in parts:
            with torch.set_grad_enabled(bool(towards)):
                loss = part_loss(part, shared)
                scaled = loss * scale
            total = total + loss.detach()
            if not towards:
                continue
            with torch.autocast(loss.device.type, enabled=False):
                found = torch.autograd.grad(scaled, [inputs[number] for number in towards], allow_unused=True)
            for number, grad in zip(towards, found, strict=True):
                before = grads[number]
                if before is None:
                    grads[number] = grad
                elif grad is not None and number in summed:
                    before.add_(grad)
                elif grad is not None:
                    grads[number] = before + grad
                    summed.add(number)
        ctx.grads, ctx.scale = grads, scale
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale, scaled = grad_outputs[0] / ctx.scale, list[Tensor | None]()
        while ctx.grads:  # each is dropped once it is handed on
            grad = ctx.grads.pop(0)
            scaled.append(None if grad is None else grad * scale)
        return None, None, None, None, *scaled
