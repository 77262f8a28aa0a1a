"""What division among devices costs beyond each device's own work. Arithmetic of shapes and links alone; nothing here was
measured on several GPUs.

    experts      a rank has some experts whole, and the others wait for the rank that tokens have chosen most
    all-to-all   α + (n − 1)/n · bytes / β
    stages       steps follow each other at the pace of the slowest stage: the others wait for it (bubbles)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from ridgeline.models.expert_config import Experts
from ridgeline.sizes.hardware import Link
from ridgeline.sizes.mesh_shape import stage_layers


def largest_of(ranks: int) -> float:
    """Standard deviations by which the largest of `ranks` normal numbers is above their mean, on average (Blom)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def expert_loads(experts: Experts, ranks: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors on what a rank would compute and read of the experts if work were even: of the rank with the most, where each has
    whole experts and tokens choose theirs evenly and independently. A preference for some experts makes it worse."""
    here = -(-experts.count // ranks)
    part, beyond = here / experts.count, largest_of(ranks)
    pairs = tokens * experts.used * part
    most = pairs + beyond * np.sqrt(pairs * (1 - part))
    most = np.minimum(most, tokens * min(experts.used, here))            # a token visits an expert once
    chosen = 1 - (1 - experts.used / experts.count) ** tokens            # an expert by any token
    read = np.minimum(here, here * chosen + beyond * np.sqrt(here * chosen * (1 - chosen)))
    even_pairs, even_read = tokens * experts.used / ranks, experts.count * chosen / ranks
    return most / np.maximum(even_pairs, 1e-30), read / np.maximum(even_read, 1e-30)


def all_to_all_seconds(link: Link, ranks: int, sent: float) -> float:
    """Every rank sends `sent` bytes, an equal part to each; its own part stays."""
    return link.latency + (ranks - 1) / ranks * sent / link.bandwidth if ranks > 1 else 0.0


def all_reduce_seconds(link: Link, ranks: int, size: float) -> float:
    return link.latency + 2 * (ranks - 1) / ranks * size / link.bandwidth if ranks > 1 else 0.0


def bubble(num_layers: int, stages: int, layers_s: float, ends_s: float) -> float:
    """Factor on a step's time where all stages have work: stages × the slowest one ÷ all of them together. `layers_s`: seconds of
    all layers; `ends_s`: of head and sampling, which the last stage has beside its layers."""
    each = [layers_s * len(stage_layers(num_layers, stage, stages)) / num_layers for stage in range(stages)]
    each[-1] += ends_s
    return stages * max(each) / sum(each)


def possible_stages(num_layers: int, nodes: int, asked: int, most: int) -> Sequence[int]:
    """Numbers of stages worth looking at: what was asked for, at least one for each machine. If nothing was, powers of two."""
    others = [stages for stages in (2, 4, 8) if stages <= min(most, num_layers)] if asked == nodes == 1 else []
    return sorted({asked, *others})
