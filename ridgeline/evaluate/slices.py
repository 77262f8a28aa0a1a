"""Named slices: kinds of text that lossy techniques damage differently. A gate uses the worst one.

| slice | where its text comes from |
|---|---|
| prose | written for this purpose (`slice_texts.py`) |
| code | sources of Python's standard library, of the Python that runs this: heapq, textwrap, bisect, statistics |
| mathematics | written for this purpose, then worked arithmetic made from the seed |
| multilingual | one text about one subject, written in twelve languages (`slice_texts.py`) |
| extraction | records made from the seed: a note in words, then the same facts as JSON |

Small, offline, and the same for the same seed (`code` also needs the same Python).
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.evaluate.slice_texts import LANGUAGES, MATHEMATICS, PROSE

_CODE_MODULES = ("heapq", "textwrap", "bisect", "statistics")
_SUMS = 60
_RECORDS = 40
_FIRST_NAMES = ("Amara", "Bela", "Chen", "Dunja", "Emeka", "Farida", "Goran", "Hanna", "Ivo", "Jun", "Keiko", "Leila")
_LAST_NAMES = ("Okafor", "Lindqvist", "Moreau", "Tanaka", "Novak", "Haddad", "Silva", "Petrov", "Iyer", "Brandt")
_CITIES = ("Oslo", "Porto", "Lagos", "Kyoto", "Quito", "Tunis", "Riga", "Perth", "Lima", "Graz")
_GOODS = ("copper wire", "glass jars", "bicycle chains", "oak boards", "sea salt", "cotton cloth", "clay tiles", "lamp oil")


def prose(seed: int) -> str:
    return PROSE


def code(seed: int) -> str:
    sources = []
    for name in _CODE_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ConfigError(f"this Python has no source of {name}; leave the slice code out")
        sources.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n\n".join(sources)


def mathematics(seed: int) -> str:
    rng = random.Random(f"mathematics-{seed}")
    return MATHEMATICS + "\n\n" + "\n".join(_worked(rng) for _ in range(_SUMS))


def _worked(rng: random.Random) -> str:
    """One calculation with its steps: every digit of the result follows from what stands before it."""
    kind = rng.randrange(4)
    a, b, c = rng.randint(12, 99), rng.randint(3, 9), rng.randint(10, 99)
    if kind == 0:
        return f"{a} × {b} + {c}: {a} × {b} = {a * b}, and {a * b} + {c} = {a * b + c}."
    if kind == 1:
        return f"Solve {b}x + {c} = {b * a + c}: {b}x = {b * a + c} − {c} = {b * a}, so x = {b * a} / {b} = {a}."
    if kind == 2:
        return f"The sum of the first {a} numbers is {a} × {a + 1} / 2 = {a * (a + 1)} / 2 = {a * (a + 1) // 2}."
    return f"{a * b} divided by {b} is {a}, because {a} × {b} = {a * b}; the rest of {a * b + 1} divided by {b} is 1."


def multilingual(seed: int) -> str:
    return "\n\n".join(LANGUAGES.values())


def extraction(seed: int) -> str:
    rng = random.Random(f"extraction-{seed}")
    return "\n\n".join(_record(rng) for _ in range(_RECORDS))


def _record(rng: random.Random) -> str:
    facts = {
        "name": f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}", "city": rng.choice(_CITIES),
        "goods": rng.choice(_GOODS), "count": rng.randint(2, 60), "price": round(rng.uniform(4, 900), 2),
        "date": f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}", "order": f"R{rng.randint(10000, 99999)}",
    }
    sentences = [
        "Note: {name} from {city} ordered {count} crates of {goods} on {date}. The price is {price} a crate, the order "
        "number {order}.",
        "Note: order {order}, placed on {date}. {count} crates of {goods} at {price} each go to {city}; ask for {name}.",
        "Note: please send {goods}, {count} crates of them, to {city}. {name} pays {price} for each; see {order} of {date}.",
    ]
    return rng.choice(sentences).format(**facts) + "\nJSON: " + json.dumps(facts)


SLICES: dict[str, Callable[[int], str]] = {
    "prose": prose, "code": code, "mathematics": mathematics, "multilingual": multilingual, "extraction": extraction,
}
