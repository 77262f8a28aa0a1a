"""Whether higher or lower is better, by a figure's name. A figure without a rule is not compared.

The name is the last part of a figure's path, or for a percentile the part before it. The first matching rule decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIGHER, LOWER = "higher", "lower"

# Parts of a record that are not results of ours: what was asked for, what the machine is, what a peer does.
SETTINGS = (
    "setting", "peaks", "floor", "machine", "device_log", "client", "errors", "timeline", "detailed", "kernels", "sustain",
    "us_per_step_by_part", "transformers", "best_goodput", "counted", "share_of_floor",
)

RULES: tuple[tuple[str, str], ...] = (
    (r"^first_tokens?_s$", LOWER),                       # seconds until they are there, and no rate
    (r"(^|_)(tok|tokens|tflop|gb|tb|requests?|steps?|events)_(per_)?s(econd)?$", HIGHER),        # rates
    (r"per_second|_throughput$|goodput|attainment|^gb_s$|^tb_s$|^tflop_s$|tok_s", HIGHER),
    (r"^roofline$|share_of|^share$|agreement|accuracy|hit_rate|^gain$|^ratio$|^speedup$|^mfu$|^mbu$|^kv_use$|kept_up", HIGHER),
    (r"^usd_per_m_|^j_per_", LOWER),
    (r"(^|_)(ttft|tpot|itl|e2el?|latency)(_|$)", LOWER),
    (r"_(ms|us|ns)(_per_\w+)?$|^microseconds$|^us_per|_per_mask$|latency|^ready|first_token", LOWER),
    (r"_s$|^seconds$|_seconds$", LOWER),
    (r"idle_|launches_per_step|preemptions|wasted|^failed$|spills", LOWER),
    (r"peak\w*bytes$|resident_mib$|(process|child|allocated|reserved|server)_bytes$", LOWER),
    (r"perplexity|kl_divergence|divergence|_error$", LOWER),
)
_COMPILED = [(re.compile(pattern), better) for pattern, better in RULES]
# How long something was run says nothing about how fast it was, and how fast the machine is nothing about us.
_NEUTRAL = re.compile(r"^(duration_s|at_s|read_bandwidth_gb_s|joules|offered_rate|backlog_growth|engine_start_s)$")
_PERCENTILE = re.compile(r"^p\d+$")


def better(path: Sequence[str]) -> str:
    """"higher", "lower", or "" without a rule. Means and maxima are never compared."""
    if any(part in SETTINGS for part in path) or not path:
        return ""
    name = path[-2] if len(path) > 1 and _PERCENTILE.match(path[-1]) else path[-1]
    if _NEUTRAL.search(name):
        return ""
    return next((direction for pattern, direction in _COMPILED if pattern.search(name)), "")
