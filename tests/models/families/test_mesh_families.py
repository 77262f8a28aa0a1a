"""Two and four processes over gloo give the logits of one for every family, however they divide the model. test_mesh.py has the
cases that do not divide evenly, on every commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_mesh import all_logits, check, leave, ranks_logits, run_ranks
from tiny_configs import CHECKPOINTS
from tiny_models import save_checkpoint

from ridgeline.distributed.meet import meet
from ridgeline.models.model_config import load_model_config
from ridgeline.sizes.mesh_shape import MeshShape

pytestmark = pytest.mark.slow

# (tensor, pipeline, whole experts on each rank, positions divided)
MESHES = {
    2: {
        "tensor": (2, 1, False, False), "pipeline": (1, 2, False, False),
        "experts": (2, 1, True, False), "context": (2, 1, False, True),
    },
    4: {"tensor of four": (4, 1, False, False), "tensor x pipeline": (2, 2, False, False)},
}


def divided(directory: Path, kind: str) -> list[str]:
    """The checkpoints that a mesh can divide: smollm2 has 3 KV heads, which do not fit 4 ranks."""
    if kind == "experts":
        return [name for name in CHECKPOINTS if load_model_config(directory / name).experts is not None]
    return [name for name in CHECKPOINTS if (kind, name) != ("tensor of four", "smollm2")]


def rank_main(rank: int, size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for kind, (tensor, pipeline, experts, context) in MESHES[size].items():
        mesh = meet(MeshShape(tensor, pipeline), rank, directory / f"store-{kind}", "gloo", 600, experts, context)
        found[kind] = all_logits(mesh, divided(directory, kind), directory)
        leave(mesh)
    torch.save(found, directory / f"logits{size}-{rank}.pt")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for name in CHECKPOINTS:
        save_checkpoint(name, directory / name, dtype=torch.float64)
    return directory


@pytest.mark.parametrize("size", MESHES)
def test_ranks_of_every_family_give_the_logits_of_one(checkpoints: Path, size: int) -> None:
    run_ranks(size, checkpoints, __file__)
    for kind in MESHES[size]:
        first = ranks_logits(checkpoints, kind, size)[0]
        for name in divided(checkpoints, kind):
            check(checkpoints, name, first)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
