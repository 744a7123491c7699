"""Optimizer of a drafter: AdamW, or Muon for the matrices of its linear layers and AdamW for everything else.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest matrix with
orthogonal rows or columns. `torch.optim.Muon` computes it; its `match_rms_adamw` scales the update to the size of
AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so that rates of both are of the same order.

torch computes in bf16. On a CPU without bf16 instructions (AVX2 alone) that took nine tenths of a training step, so
`Fp32Muon` takes its place there.

AdamW updates embeddings, [MASK] vectors, norms, biases and heads over the vocabulary, as in both sources, and the
weights that a kind trains at a separate rate (`Drafter.learning_rate_factors`).
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
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


def multiplies_bf16_fast(device: torch.device) -> bool:
    """Return whether matrices in bf16 are multiplied at least as fast there as in fp32."""
    library = torch.backends.mkldnn
    return device.type != "cpu" or (library.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Fp32Muon(torch.optim.Muon):
    """torch's Muon with groups and state of the same names, whose Newton-Schulz iteration is in the weights' dtype.

    The learning rate is always adjusted by `match_rms_adamw`, and the momentum is Nesterov's.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix_mn in group["params"]:
                if (grad_mn := matrix_mn.grad) is None:
                    continue
                momentum_mn = self.state[matrix_mn].get("momentum_buffer")
                if momentum_mn is None:
                    momentum_mn = self.state[matrix_mn]["momentum_buffer"] = torch.zeros_like(grad_mn)
                momentum_mn.lerp_(grad_mn, 1 - group["momentum"])
                update_mn = grad_mn.lerp(momentum_mn, group["momentum"])
                matrix_mn.mul_(1 - group["lr"] * group["weight_decay"])
                factor = 0.2 * max(matrix_mn.shape) ** 0.5
                matrix_mn.add_(self._orthogonalize(update_mn, group), alpha=-group["lr"] * factor)

    @staticmethod
    def _orthogonalize(matrix_mn: Tensor, group: dict[str, Any]) -> Tensor:
        """Return [m, n] with about the same singular vectors and singular values of about 1."""
        a, b, c = group["ns_coefficients"]
        is_tall = matrix_mn.shape[0] > matrix_mn.shape[1]
        wide = matrix_mn.T if is_tall else matrix_mn
        wide = wide / wide.norm().clamp(min=group["eps"])
        for _ in range(group["ns_steps"]):
            gram = wide @ wide.T
            wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
        return wide.T if is_tall else wide


class MuonWithAdamW(Optimizer):
    """Optimizer that updates some parameter groups by Muon and the others by AdamW, with a common state.

    Schedulers and checkpoints see an ordinary optimizer. A group with the key `momentum` is Muon's.

    Args:
        adamw_groups: Parameter groups of a `torch.optim.AdamW`, with all their settings.
        muon_groups: Parameter groups of 2-D parameters for `torch.optim.Muon`: `params`, `lr`, `weight_decay`.
    """

    def __init__(self, adamw_groups: list[dict[str, Any]], muon_groups: list[dict[str, Any]]) -> None:
        devices = {parameter.device for group in muon_groups for parameter in group["params"]}
        chosen = torch.optim.Muon if all(map(multiplies_bf16_fast, devices)) else Fp32Muon
        self._muon = chosen(muon_groups, adjust_lr_fn="match_rms_adamw")
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
        self._share()  # loading a checkpoint replaces groups and state
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
