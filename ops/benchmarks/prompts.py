"""The prompts of a benchmark: JSONL files of {"turns": [...]}, or a small set of our own.

Only the first turn is used: a benchmark measures speed, and the next turns would depend on the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from drafter.data import read_prompts
from drafter.target import load_tokenizer, render_chat

BUILT_IN = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Dataset:
    """Prompts as the model sees them."""

    name: str
    prompts: tuple[tuple[int, ...], ...]

    def take(self, start: int, count: int) -> list[tuple[int, ...]]:
        """`count` prompts from `start` on, beginning again after the last."""
        return list(islice(cycle(self.prompts), start, start + count))


def read_texts(file: Path) -> list[str]:
    """First turns of a JSONL file. Raises ValueError with file and line when a line isn't {"turns": [text, ...]}."""
    return [prompt.turns[0] for prompt in read_prompts(file)]


def load_datasets(files: Sequence[Path], model_folder: Path) -> list[Dataset]:
    """One data set per file (the built-in one without files), rendered by the model's chat template."""
    tokenizer = load_tokenizer(model_folder)
    return [
        Dataset(
            file.stem.removeprefix("eval_") if file != BUILT_IN else "built-in",
            tuple(tuple(render_chat(tokenizer, [{"role": "user", "content": text}])) for text in read_texts(file)),
        )
        for file in files or (BUILT_IN,)
    ]
