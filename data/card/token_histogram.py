"""How long prompts and answers are, as a picture."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BINS = 40
COLOURS = {"prompt": "#0072B2", "answer": "#E69F00"}  # Okabe and Ito: told apart by colour-blind readers too


def draw_token_histogram(prompt_tokens: Sequence[int], answer_tokens: Sequence[int], file: Path, title: str) -> None:
    """One panel each for the tokens of a conversation's prompt side and of its answers; a logarithmic scale below."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, (name, colour), lengths in zip(panels, COLOURS.items(), (prompt_tokens, answer_tokens), strict=True):
        edges = np.geomspace(max(1, min(lengths)) - 0.5, max(lengths) + 0.5, BINS + 1)
        axes.hist(lengths, bins=edges.tolist(), color=colour)
        axes.axvline(float(np.median(lengths)), color="#444444", linewidth=1, linestyle="--", label="median")
        axes.set_xscale("log")
        axes.set_xlabel(f"{name} tokens of a conversation")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("conversations")
    panels[1].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=140)
    plt.close(figure)
