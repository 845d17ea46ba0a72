"""Training on several processes: how many share a step, and in how many parts, changes nothing that is learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, multiprocessing

from drafter.__main__ import main
from drafter.data import Response, response_line
from drafter.ranks import Ranks
from drafter.target import Target
from drafter.train import Trainer
from tests.drafter.test_train import trainer_for

STEPS = 4
SHAPE = ["--layers", "1", "--block-size", "3", "--markov-rank", "8", "--draft-vocabulary", "64", "--threads", "1"]


def gradients(target: Target, responses: list[Response], **changes: object) -> Tensor:
    trainer = trainer_for(target, responses, distillation_fraction=0.0, **changes)
    trainer._update = lambda: None  # type: ignore[method-assign]
    trainer.train_step()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def test_parts_of_a_step_add_up_to_its_gradient(tiny_target: Target, tiny_responses: list[Response]) -> None:
    whole = gradients(tiny_target, tiny_responses)
    for parts in (3, 8, 50):
        again = gradients(tiny_target, tiny_responses, gradient_accumulation_steps=parts)
        assert (again - whole).norm() < 0.02 * whole.norm(), "more than the rounding of bf16"
    other = gradients(tiny_target, tiny_responses, seed=1)
    assert (other - whole).norm() > 0.2 * whole.norm()


@pytest.mark.parametrize(("size", "pieces", "count"), [(1, 1, 8), (3, 2, 8), (4, 3, 3), (2, 5, 7)])
def test_every_row_is_computed_once(size: int, pieces: int, count: int) -> None:
    shares = [Ranks(rank, size).share(count, pieces) for rank in range(size)]
    parts = [part for share in shares for part in share]
    assert sorted(row for part in parts for row in part) == list(range(count))
    assert all(parts) and all(len(share) <= pieces for share in shares)


def test_processes_add_up_wait_and_agree(tmp_path: Path) -> None:
    multiprocessing.spawn(process, (tmp_path,), nprocs=2)
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == ([[1.0, 3.0], [1.0]], "left")


def process(rank: int, folder: Path) -> None:
    """Rank `rank` of two."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks, tensors = Ranks(rank, 2), [torch.arange(2.0) + rank, torch.tensor([float(rank)])]
    ranks.add_up(tensors)
    with ranks.leader_first():
        if ranks.is_leader:
            time.sleep(0.5)
            (folder / "left").write_text("left")
        seen = (folder / "left").read_text()
    ranks.agree(step=7, weights=0.5)
    with pytest.raises(ValueError, match=r"don't have the same step \(\[0, 1\]\)"):
        ranks.agree(step=rank, weights=0.5)
    torch.save(([tensor.tolist() for tensor in tensors], seen), folder / f"{rank}.pt")
    distributed.destroy_process_group()


def test_more_processes_than_sequences_are_refused(tiny_target: Target, tiny_responses: list[Response]) -> None:
    trainer = trainer_for(tiny_target, tiny_responses, sequences_per_step=2)
    with pytest.raises(ValueError, match="--sequences-per-step 2 is too few: each of 3 processes"):
        Trainer(trainer.model, trainer.memory, tiny_responses, trainer.config, Ranks(0, 3))


def train(folder: Path, target: Path, name: str, *options: str, processes: int = 1) -> dict[str, Tensor]:
    command = ["drafter", "train", "--target", str(target), "--responses", str(folder / "responses.jsonl")]
    command += ["--output", str(folder / name), *SHAPE, *options]
    if processes == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", command)
            main()
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launcher, *command], check=True, timeout=240, env=environment)
    return load_file(folder / name / "checkpoint" / "model.safetensors")


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return sum(float((one[name].float() - other[name].float()).square().sum()) for name in one) ** 0.5


def test_torchrun_trains_the_same_drafter(chat_model: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 258, (30,), generator=generator).tolist() for _ in range(7 * STEPS)]
    lines = [response_line(Response(tuple(row), ((4, 30),))) for row in rows]
    (tmp_path / "responses.jsonl").write_text("".join(lines))
    # 7 sequences a step: the processes get 4 and 3. 25 anchors of 3 slots, the last ones shorter: 72 slots a sequence.
    budget = ["--sequences-per-step", "7", "--slots", str(7 * 72 * STEPS)]
    still = ["--slots", "1", "--learning-rate", "0", "--muon-learning-rate", "0"]
    first = train(tmp_path, chat_model, "first", *still)
    alone = train(tmp_path, chat_model, "alone", *budget)
    parts = ["--gradient-accumulation-steps", "2"]
    together = train(tmp_path, chat_model, "together", *budget, *parts, processes=2)
    facts = json.loads((tmp_path / "together" / "checkpoint" / "provenance.json").read_text())
    assert (facts["processes"], facts["steps"]) == (2, STEPS)
    assert distance(alone, together) < 0.1 * distance(alone, first)
    other = train(tmp_path, chat_model, "other", *budget, "--seed", "1")
    assert distance(alone, other) > 0.3 * distance(alone, first)
