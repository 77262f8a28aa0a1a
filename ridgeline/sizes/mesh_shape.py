"""Which rank has which place in the mesh, and which stage has which layers. Pure arithmetic: no torch, no processes.

Rank 0 plans, samples and answers, so it belongs to the last stage: what it needs of a step is in its own memory. The ranks of a
stage come one after the other, the last stage first.

    tensor 2, pipeline 2:    ranks 0 and 1 have the last layers and the head, ranks 2 and 3 the embedding and the first layers
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ConfigError

# One-shot all-reduces (ops/one_shot_sum.py): a CTA sums a chunk, and a message has at most as many chunks as there are CTAs.
ONE_SHOT_CHUNK, ONE_SHOT_CTAS = 4096, 128
ONE_SHOT_MOST = ONE_SHOT_CHUNK * ONE_SHOT_CTAS           # bytes of a message
ONE_SHOT_RANKS = 8                                       # a rank reads from all others: more of them pay less


def one_shot_bytes(ranks: int) -> int:
    """Of a rank's buffer: two slots, a flag for each CTA and rank, and the number of calls of each CTA."""
    return 2 * ONE_SHOT_MOST + ONE_SHOT_CTAS * (ranks + 1) * 8


def one_shot_memory(ranks: int) -> int:
    """What the buffer takes of a GPU: the driver shares memory in pieces, and torch keeps flags of its own beside it."""
    piece, torch_flags = 2**21, 2**16
    return -(-(one_shot_bytes(ranks) + torch_flags) // piece) * piece


@dataclass(frozen=True, slots=True)
class MeshShape:
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return self.pipeline - 1 - rank // self.tensor

    def of_stage(self, stage: int) -> list[int]:
        """The ranks of a stage, by tensor rank."""
        first = (self.pipeline - 1 - stage) * self.tensor
        return list(range(first, first + self.tensor))


def stage_layers(num_layers: int, stage: int, stages: int) -> range:
    """The layers of a stage. Where they do not divide evenly, earlier stages have one more: the last has the head as well."""
    if stages > num_layers:
        raise ConfigError(f"pipeline_parallel_size {stages} is more than the model's {num_layers} layers")
    share, more = divmod(num_layers, stages)
    first = stage * share + min(stage, more)
    return range(first, first + share + (stage < more))
