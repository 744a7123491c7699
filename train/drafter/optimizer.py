"""Optimizer of a drafter: AdamW, or Muon for the matrices of its linear layers and AdamW for everything else.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest matrix with
orthogonal rows or columns. `torch.optim.Muon` computes it; its `match_rms_adamw` scales the update to the size of
AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so that rates of both are of the same order.

AdamW updates embeddings, [MASK] vectors, norms, biases and heads over the vocabulary, as in both sources, and the
weights that a kind trains at a separate rate (`Drafter.learning_rate_factors`).
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter

OptimizerName = Literal["adamw", "muon"]


def muon_parameters(drafter: Drafter) -> list[str]:
    """Return the names of the trained matrices that Muon updates: weights of linear layers, except vocabulary heads."""
    markov = [] if drafter.markov_head is None else [drafter.markov_head.markov_w2]
    heads = {id(head) for head in [*drafter.own_heads, *markov]}
    prefixes = tuple(drafter.learning_rate_factors)
    return [
        f"{name}.weight"
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and min(module.in_features, module.out_features) > 1
        and id(module) not in heads
        and not f"{name}.weight".startswith(prefixes)
    ]


class MuonWithAdamW(Optimizer):
    """Optimizer that updates some parameter groups by Muon and the others by AdamW, with a common state.

    Schedulers, checkpoints and FSDP2 see an ordinary optimizer. A group with the key `momentum` is Muon's.

    Args:
        adamw_groups: Parameter groups of a `torch.optim.AdamW`, with all their settings.
        muon_groups: Parameter groups of 2-D parameters for `torch.optim.Muon`: `params`, `lr`, `weight_decay`.
    """

    def __init__(self, adamw_groups: list[dict[str, Any]], muon_groups: list[dict[str, Any]]) -> None:
        self._muon = torch.optim.Muon(muon_groups, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(adamw_groups)
        super().__init__([*self._adamw.param_groups, *self._muon.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimizers read and write this one's groups and state."""
        self._muon.param_groups = [group for group in self.param_groups if "momentum" in group]
        self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self._muon.state = self._adamw.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Update all parameters once from their gradients."""
        self._share()  # loading a checkpoint and FSDP2 replace groups and state
        loss = self._adamw.step(closure)
        self._muon.step()
        return loss


def muon_with_adamw(adamw: Optimizer, drafter: Drafter, learning_rate: float) -> MuonWithAdamW:
    """Build the optimizer that updates a drafter's matrices by Muon and its other weights by the given AdamW.

    Args:
        adamw: Optimizer of the drafter's parameters, without a step yet; matrices keep its weight decay.
        learning_rate: Muon's learning rate.

    Raises:
        UserError: Another optimizer was chosen by `train.optim`, or the drafter has no matrix for Muon.
    """
    if not isinstance(adamw, torch.optim.AdamW):
        raise UserError(
            "key `train.optim`: leave it out, as train.optimizer=muon updates the other weights by torch's AdamW"
        )
    wanted = set(muon_parameters(drafter))
    matrices = {parameter for name, parameter in drafter.named_parameters() if name in wanted}
    if not matrices:
        raise UserError("key `train.optimizer`: this drafter has no matrices that Muon could update: use adamw")
    adamw_groups, muon_groups = [], []
    for group in adamw.param_groups:
        moved = [parameter for parameter in group["params"] if parameter in matrices]
        kept = [parameter for parameter in group["params"] if parameter not in matrices]
        if kept:
            adamw_groups.append({**group, "params": kept})
        if moved:
            muon_groups.append({"params": moved, "lr": learning_rate, "weight_decay": group["weight_decay"]})
    return MuonWithAdamW(adamw_groups, muon_groups)


def apply_learning_rate_factors(optimizer: Optimizer, drafter: Drafter) -> None:
    """Multiply the learning rates of a new optimizer by `Drafter.learning_rate_factors`, by splitting its groups."""
    factors = drafter.learning_rate_factors
    if not factors:
        return
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            prefixes = [prefix for prefix in factors if names[parameter].startswith(prefix)]
            by_factor.setdefault(factors[prefixes[0]] if prefixes else 1.0, []).append(parameter)
        groups += [
            {**group, "params": parameters, "lr": group["lr"] * factor} for factor, parameters in by_factor.items()
        ]
    optimizer.param_groups[:] = groups
