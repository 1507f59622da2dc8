"""What a run is made of: one frozen value, from a named preset and the flags that override it."""

import dataclasses
from dataclasses import dataclass

IMPLEMENTATIONS = ("mosaic", "triton", "xla", "reference", "cudnn")
DTYPES = ("float32", "bfloat16")
DOCUMENTS = ("file", "directory")
REMATS = ("none", "attention", "block")  # each saves more memory and repeats more
# What a run writes in OUT.
CHECKPOINTS = "checkpoints"
CSV_NAME = "metrics.csv"
PLOT_NAME = "loss.png"
PROFILE = "profile"
LOCK = ".lock"
WRITTEN = (CHECKPOINTS, CSV_NAME, PLOT_NAME, PROFILE, LOCK)
# The fields that train_lm takes as flags.
FLAGS = (
    "preset",
    "documents",
    "steps",
    "batch",
    "accumulate",
    "length",
    "learning_rate",
    "seed",
    "dtype",
    "remat",
    "implementation",
    "checkpoint_every",
)


LEAST_LENGTH = 16  # tokens a row


class InputError(Exception):
    """The user's mistake, in one line that says what to do; never a bug of ours."""


@dataclass(frozen=True)
class Config:
    """Sizes are counts, `length` is in tokens, rates are per step.

    A step sums the gradients of `accumulate` micro-batches of `batch` rows. `warm_up` and
    `final_rate` are fractions, of `steps` and of `learning_rate`, so that a run shortened with
    `--steps` keeps the shape of its schedule. After the last step the model writes `sample` tokens
    after a prompt of `prompt`.
    """

    preset: str
    length: int
    batch: int
    steps: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    learning_rate: float
    accumulate: int = 1
    documents: str = "file"
    warm_up: float = 0.1
    final_rate: float = 0.05
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    dtype: str = "float32"
    remat: str = "none"
    implementation: str | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 100
    checkpoint_every: int = 100
    evaluation_rows: int = 32
    final_evaluation_rows: int = 256
    prompt: int = 200
    sample: int = 300

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def rows_per_step(self) -> int:
        return self.batch * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.length

    def override(self, **flags: object) -> "Config":
        """The same run with every flag that was given (is not None) in place of the preset's."""
        given = {name: value for name, value in flags.items() if value is not None}
        return dataclasses.replace(self, **given).checked()  # type: ignore[arg-type]

    def checked(self) -> "Config":
        """Itself, or an InputError that names the flag."""
        at_least = {
            "steps": 1,
            "batch": 1,
            "accumulate": 1,
            "length": LEAST_LENGTH,
            "seed": 0,
            "checkpoint_every": 1,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                flag = flag_name(name)
                raise InputError(f"{flag} is {getattr(self, name)}; give {least} or more")
        if not 0 < self.learning_rate < 1:
            raise InputError(
                f"--learning-rate is {self.learning_rate}; give a number between 0 and 1"
            )
        return self


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


PRESETS = {
    # For two CPU cores: 175 CPU seconds in all, to 2.02 nats/byte on Python 3.12's library. Steps
    # are small and many, since updates count for more than tokens: 0.7 M tokens took a four-layer
    # model to 1.87 in 350 steps, to 2.11 in 175.
    "tiny": Config(
        preset="tiny",
        length=1024,
        batch=2,
        steps=300,
        layers=2,
        width=128,
        heads=4,
        kv_heads=4,
        mlp_width=384,
        learning_rate=3e-3,
        evaluate_every=50,
    ),
    # The sizes below are planned for one H200. What a step takes is XLA's plan for it, compiled for
    # a CPU: 46 GB here (13 GB with --batch 16 --accumulate 4, the same run), 25 GB for long-32k and
    # for long-128k, where it would be 118 GB without remat and 22 GB with "block". Minutes count
    # the model's FLOPs at 300 TFLOP/s: 6, 23 and 43.
    #
    # GPT-2's small sizes, with a gated MLP of as many parameters: 85 M in matrices. 197 M tokens
    # are six epochs of the standard library; more only overfits.
    "gpt2-small-1k": Config(
        preset="gpt2-small-1k",
        length=1024,
        batch=64,
        steps=3000,
        layers=12,
        width=768,
        heads=12,
        kv_heads=12,
        mlp_width=2048,
        learning_rate=6e-4,
        dtype="bfloat16",
        checkpoint_every=500,
    ),
    # 136 M parameters. Rows are pieces of whole directories, so that half a row is what a token
    # sees on average: 16 k tokens, and 61 k in long-128k. 4.3 and 2.6 epochs.
    "long-32k": Config(
        preset="long-32k",
        length=32_768,
        batch=4,
        documents="directory",
        steps=1000,
        layers=12,
        width=1024,
        heads=8,
        kv_heads=2,
        mlp_width=2816,
        learning_rate=6e-4,
        dtype="bfloat16",
        remat="attention",
        log_every=5,
        final_evaluation_rows=64,
    ),
    "long-128k": Config(
        preset="long-128k",
        length=131_072,
        batch=1,
        accumulate=2,
        documents="directory",
        steps=300,
        layers=12,
        width=1024,
        heads=8,
        kv_heads=2,
        mlp_width=2816,
        learning_rate=6e-4,
        dtype="bfloat16",
        remat="attention",
        log_every=2,
        evaluate_every=50,
        checkpoint_every=50,
        evaluation_rows=4,
        final_evaluation_rows=16,
    ),
}
