"""The typed form of `recipes/target.yaml`: how the embedded target is built and trained."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from draftsmith.recipes.schema import Section


class CorpusSection(Section):
    seed: int = 0
    row_tokens: int = Field(512, gt=1)
    limit: int | None = Field(None, gt=0)  # only the first so many conversations, for tests
    eval_rows: int = Field(32, gt=0)
    user_token_weight: float = Field(0.3, ge=0, le=1)  # assistant tokens weigh 1


class ModelSection(Section):
    vocab_size: int = Field(4096, gt=256)
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 10
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10_000.0


class ScheduleSection(Section):
    epochs: float = Field(6.0, gt=0)
    max_minutes: float = Field(90.0, gt=0)  # the decay always ends on time: progress is the larger of steps and clock
    rows_per_step: int = Field(4, gt=0)
    learning_rate: float = Field(1.5e-3, gt=0)
    warmup_steps: int = Field(100, ge=0)
    decay_frac: float = Field(0.6, gt=0, le=1)
    weight_decay: float = 0.05
    seed: int = 0
    compile: bool = True
    save_steps: int = Field(200, gt=0)
    eval_steps: int = Field(250, gt=0)
    snapshot_minutes: float = Field(10.0, gt=0)


class EmbeddedTargetRecipe(Section):
    output_dir: Path = Path("models/embedded_target")
    work_dir: Path = Path("runs/target")  # checkpoints to resume from, and the log
    corpus: CorpusSection = CorpusSection()
    model: ModelSection = ModelSection()
    schedule: ScheduleSection = ScheduleSection()
