"""The cost of tokens: dollars from a price per hour, joules from the reported power.

An hour pays for input and output together. So there are three figures: all of the cost on the output tokens, all of it on the
input tokens, and both together; a tariff lies between the first two.
"""

from __future__ import annotations

import argparse
from typing import Any

from ridgeline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price", type=float, metavar="USD",
        help="price of the machine in dollars per hour: adds $ per million tokens, and J per token if power is reported",
    )


def check(price: float | None) -> None:
    if price is not None and not price > 0:
        raise ConfigError(f"--price must be above 0 dollars per hour, got {price:g}")


def cost(
    price: float | None, seconds: float, tokens_in: float, tokens_out: float, joules: float | None = None
) -> dict[str, Any]:
    """The cost of a run; empty without a price. Energy only if power was measured. `tokens_in`: 0 if unknown, and then there
    is no figure for all tokens."""
    if price is None:
        return {}
    together = tokens_in + tokens_out if tokens_in else 0
    dollars = price / 3600 * seconds
    found: dict[str, Any] = {"usd_per_hour": price}
    for name, tokens in (("output", tokens_out), ("input", tokens_in), ("all", together)):
        if tokens:
            found[f"usd_per_m_{name}_tokens"] = dollars / tokens * 1e6
    if joules is not None:
        found["joules"] = joules
        for name, tokens in (("output", tokens_out), ("all", together)):
            if tokens:
                found[f"j_per_{name}_token"] = joules / tokens
    return found


def line(found: dict[str, Any]) -> str:
    parts = [
        f"${found[f'usd_per_m_{name}_tokens']:.4g} per million {name} tokens"
        for name in ("output", "input", "all")
        if f"usd_per_m_{name}_tokens" in found
    ]
    if "j_per_output_token" in found:
        parts.append(f"{found['j_per_output_token']:.3g} J per output token")
    elif found:
        parts.append("power not reported")
    return ", ".join(parts)
