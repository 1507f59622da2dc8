"""What a run is made of: one frozen value, from a named preset and the flags that override it."""

import dataclasses
from dataclasses import dataclass

IMPLEMENTATIONS = ("mosaic", "triton", "xla", "reference", "cudnn")
DTYPES = ("float32", "bfloat16")


class InputError(Exception):
    """The user's mistake, in one line that says what to do; never a bug of ours."""


@dataclass(frozen=True)
class Config:
    """Sizes are counts, `length` is in tokens, rates are per step.

    `warm_up` and `final_rate` are fractions, of `steps` and of `learning_rate`, so that a run
    shortened with `--steps` keeps the shape of its schedule.
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
    warm_up: float = 0.1
    final_rate: float = 0.05
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    dtype: str = "float32"
    implementation: str | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 100
    evaluation_rows: int = 32
    final_evaluation_rows: int = 256

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length

    def override(self, **flags: object) -> "Config":
        """The same run with every flag that was given (is not None) in place of the preset's."""
        given = {name: value for name, value in flags.items() if value is not None}
        return dataclasses.replace(self, **given).checked()  # type: ignore[arg-type]

    def checked(self) -> "Config":
        """Itself, or an InputError that names the flag."""
        at_least = {"steps": 1, "batch": 1, "length": 16, "seed": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise InputError(f"--{name} is {getattr(self, name)}; give {least} or more")
        if not 0 < self.learning_rate < 1:
            raise InputError(
                f"--learning-rate is {self.learning_rate}; give a number between 0 and 1"
            )
        return self


PRESETS = {
    # For two CPU cores: 157 CPU seconds in all, to 1.99 nats/byte on Python 3.12's library. Steps
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
}
