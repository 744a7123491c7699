"""What `draftsmith prove` found, on screen and in `runs/<name>/eval/proof.json`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.eval.artifacts.measurement import drafter_weights
from draftsmith.eval.bench.divergence import Divergence
from draftsmith.recipes.run_folder import RunFolder, read_json
from draftsmith.recipes.schema import Recipe

PROOF = "proof.json"
BINS = 20  # of a distribution test
SIGNIFICANCE = 1e-3  # of all distribution tests together
ENUMERATION_TOLERANCE = 1e-9


@dataclass
class GreedyProof:
    method: str
    prompts: int
    tokens: int
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(divergence.is_tie for divergence in self.divergences)


@dataclass
class DistributionProof:
    """`impossible`: tokens that the target gives no probability at all."""

    method: str
    temperature: float
    tokens: int
    impossible: int
    chi_square: float
    p_value: float

    def holds(self, significance: float) -> bool:
        return self.impossible == 0 and self.p_value >= significance


@dataclass
class Proof:
    """All evidence; `holds` is what the exit code says."""

    greedy: list[GreedyProof]
    distribution: list[DistributionProof]
    enumeration_error: float
    drafter_weights: list[str | None]  # SHA-256, of what this is the proof of
    left_out: list[str] = field(default_factory=list)  # methods with lenience: nobody says that they are lossless

    @property
    def significance(self) -> float:
        """The significance of one distribution test."""
        return SIGNIFICANCE / max(1, len(self.distribution))

    @property
    def holds(self) -> bool:
        return (
            all(proof.holds for proof in self.greedy)
            and all(proof.holds(self.significance) for proof in self.distribution)
            and self.enumeration_error <= ENUMERATION_TOLERANCE
        )

    def as_json(self) -> dict[str, Any]:
        """The figures with their verdicts, as JSON stores them."""
        return {
            "holds": self.holds,
            "greedy": [
                {**asdict(proof), "holds": proof.holds, "ties": sum(d.is_tie for d in proof.divergences)}
                for proof in self.greedy
            ],
            "distribution": [{**asdict(proof), "holds": proof.holds(self.significance)} for proof in self.distribution],
            "significance": self.significance,
            "enumeration_error": self.enumeration_error,
            "drafter_weights": self.drafter_weights,
            "left_out": self.left_out,
        }

    def show(self, console: Console) -> None:
        table = Table(title="greedy identity", title_justify="left")
        for column in ("method", "prompts", "tokens", "different answers", "numerical ties", "holds"):
            table.add_column(column)
        for greedy in self.greedy:
            ties = sum(divergence.is_tie for divergence in greedy.divergences)
            cells = (greedy.prompts, greedy.tokens, len(greedy.divergences), ties)
            table.add_row(greedy.method, *map(str, cells), _yes(greedy.holds))
        console.print(table)
        for greedy in self.greedy:
            for found in greedy.divergences:
                console.print(
                    f"{greedy.method}, question {found.question_id}, token {found.position}: {found.found} instead of "
                    f"{found.expected}; its logit is {found.gap:.2e} below the largest, noise {found.noise:.2e}: "
                    + ("a tie" if found.is_tie else "[bold red]a bug[/bold red]")
                )
        table = Table(title="distribution of sampled tokens", title_justify="left")
        for column in ("method", "T", "tokens", "impossible", f"chi-square ({BINS - 1} df)", "p-value", "holds"):
            table.add_column(column)
        for proof in self.distribution:
            figures = (f"{proof.temperature:g}", str(proof.tokens), str(proof.impossible), f"{proof.chi_square:.1f}")
            verdict = _yes(proof.holds(self.significance))
            table.add_row(proof.method, *figures, f"{proof.p_value:.3f}", verdict)
        console.print(table)
        console.print(f"verifier, by enumeration: largest error {self.enumeration_error:.1e}")
        if self.left_out:
            console.print(f"not lossless by their lenience, so left out: {', '.join(self.left_out)}", style="bold")
        console.print("[bold]proved[/bold]" if self.holds else "[bold red]NOT PROVED[/bold red]")


def recorded_proof(recipe: Recipe) -> dict[str, Any] | None:
    """What `draftsmith prove` found out about these very drafters, if it was run."""
    file = RunFolder(recipe).eval / PROOF
    if not file.is_file():
        return None
    proof = read_json(file, Proof, "delete it and run `draftsmith prove` again")  # verdicts are worked out again
    return proof.as_json() if proof.drafter_weights == drafter_weights(recipe) else None


def _yes(holds: bool) -> str:
    return "yes" if holds else "[bold red]NO[/bold red]"
