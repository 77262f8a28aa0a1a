"""The page's own functions, run under Node: Markdown, idle time in lines, shares, percentiles, commands."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

from ridgeline.report.words import GROUP_OF
from ridgeline.server.observe.roofline_endpoint import HISTORY

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node here")
PAGE = resources.files("ridgeline.server.observe") / "page"
AT, BUSY = HISTORY.index("at"), HISTORY.index("busy")


def run(*calls: tuple[str, list[Any]]) -> list[Any]:
    """What functions of the page return, in one process."""
    scripts = "\n".join((PAGE / name).read_text("utf-8") for name in ("figures.js", "markdown.js", "fleet.js"))
    asked = json.dumps([[name, arguments] for name, arguments in calls])
    named = ", ".join(sorted({name for name, _ in calls}))
    script = f"{scripts}\nconst known = {{ {named} }};\n" \
             f"console.log(JSON.stringify({asked}.map(([name, given]) => known[name](...given))));"
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_markdown_becomes_a_tree() -> None:
    text = ("# Title\nA **bold** and *slanted* `x < y` word, snake_case_name.\n\n- one\n- two\n  1. inner\n\n"
            "```py\nprint('<b>')\n```\n> quoted\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n---\n[site](http://a.org) \\*plain\\*")
    [tree] = run(("parse", [text]))
    assert [block["kind"] for block in tree] == ["heading", "text", "list", "code", "quote", "table", "rule", "text"]
    assert tree[1]["spans"] == [
        {"kind": "text", "text": "A "}, {"kind": "strong", "spans": [{"kind": "text", "text": "bold"}]},
        {"kind": "text", "text": " and "}, {"kind": "em", "spans": [{"kind": "text", "text": "slanted"}]},
        {"kind": "text", "text": " "}, {"kind": "code", "text": "x < y"}, {"kind": "text", "text": " word, snake_case_name."},
    ]
    first, second = tree[2]["items"]
    assert not tree[2]["ordered"] and len(first) == 1 and second[1]["kind"] == "list" and second[1]["ordered"]
    assert tree[3] == {"kind": "code", "language": "py", "text": "print('<b>')", "open": False}
    assert tree[5]["rows"] == [[[{"kind": "text", "text": "1"}], [{"kind": "text", "text": "2"}]]]
    # A link shows where it leads and cannot be clicked; what is escaped stays as it is.
    assert tree[7]["spans"] == [{"kind": "text", "text": "site (http://a.org) *plain*"}]


def test_markdown_that_is_still_being_written() -> None:
    """Every beginning of an answer can be drawn, and what has come so far is in it."""
    text = "**a** - \n1. b\n> c\n| d |\n|---|\n[e](f) `g` ~~~ \\ # ```js\n```js\nlet x"
    trees = run(*(("parse", [text[:length]]) for length in range(len(text) + 1)))
    assert trees[-1][-1] == {"kind": "code", "language": "js", "text": "let x", "open": True}
    for length, tree in enumerate(trees):
        said = json.dumps(tree)
        assert all(f"{letter}" in said for letter in "abcdefg" if letter in text[:length].replace("code", ""))


def test_no_markdown_loses_words_or_takes_long() -> None:
    hard = ["*a " * 4000, "[" * 8000, "_a " * 4000, "**a" * 4000, "> " * 3000 + "x", "- " * 3000 + "x", "`" * 8001, "~~x" * 4000]
    done = run(*(("parse", [text]) for text in hard))            # a minute for all of them, in one process
    assert all(json.dumps(tree).count("a") >= text.count("a") for tree, text in zip(done, hard, strict=True))


def sample(at: float, busy: float) -> list[float]:
    row = [0.0] * len(HISTORY)
    row[AT], row[BUSY] = at, busy
    return row


def test_idle_time_is_no_slope() -> None:
    """Samples come only while there is work: two seconds of it, a minute of nothing, one second, and nothing since."""
    rows = [sample(72, 1.0), sample(71, 1.0), sample(11, 0.01)]
    [found] = run(("stretches", [rows, AT, BUSY]))
    assert [(part["from"], part["to"], part["row"] is None) for part in found] == [
        (73, 72, False), (72, 71, False), (71, 12, True), (12, 11, False), (11, 0, True),
    ]
    assert found[3]["dense"] == 60                       # the sample's averages are over the whole minute
    assert run(("stretches", [[], AT, BUSY]), ("stretches", [[sample(0.5, 1)], AT, BUSY]))[1][-1]["to"] == 0.5


def test_lines_over_time_fill_their_card() -> None:
    spans = run(*(("spanOf", [[{"from": age}]]) for age in (5, 31, 119, 500)), ("spanOf", [[]]))
    assert spans == [30, 60, 120, 120, 120]


def test_both_cards_share_their_parts() -> None:
    parts = {"implementation": 6.0, "compute": 1.0, "weight_bandwidth": 1.5, "kv_bandwidth": 0.5, "host": 0.9, "launch": 0.1,
             "new_part": 0.0}
    listed, grouped = run(("shares", [parts]), ("groups", [parts, GROUP_OF]))
    assert listed[0] == ["implementation", 0.6] and "new_part" not in dict(listed)
    assert grouped == pytest.approx({"kernels": 0.6, "compute": 0.1, "memory": 0.2, "overhead": 0.1})


def test_a_shared_machine_is_read_from_the_verdict() -> None:
    shared = {"host": 1.0, "shared_machine": 3.0}
    assert run(*(("othersShare", [parts]) for parts in ({"host": 1.0}, shared, {}))) == [0, 0.75, 0]
    assert run(("groups", [shared, GROUP_OF])) == [{"others": 0.75, "overhead": 0.25}]


def test_a_gpu_at_its_power_limit_is_told() -> None:
    line = "692 of 700 W, SM clock 1,275 of 1,980 MHz"
    told = ({}, {"line": line, "limited_by": ""}, {"line": line, "limited_by": "power"})
    assert run(*(("gpuLine", [gpu]) for gpu in told)) == ["", f"GPU: {line}.", f"GPU: {line}; power lowers the clock."]


def test_words_for_numbers() -> None:
    spread = {"count": 7, "p50": 3.55, "p90": 3.55, "p99": 3.55}
    many = {"count": 20, "p50": 0.5, "p90": 0.75, "p99": 1}
    assert run(("counted", [1, "answer"]), ("counted", [1200, "token"])) == ["1 answer", "1,200 tokens"]
    assert run(
        ("percentile", [spread, "p50"]), ("percentile", [spread, "p99"]), ("percentile", [many, "p99"]),
        ("percentile", [{"count": 0, "p50": None}, "p90"]),
    ) == ["3.55 s", "too few", "1 s", "–"]
    assert run(("doubtful", [{"hfu": 0.5, "mbu": 1.3}]), ("doubtful", [{"hfu": 1.0, "mbu": 0.5, "peaks_doubtful": True}]),
               ("doubtful", [{"hfu": 1.0, "mbu": 0.5}])) == [True, True, False]
    assert run(("utilised", [1.32]), ("utilised", [0.5]), ("si", [7.3e10, "FLOP/s"])) == ["–", "50.0 %", "73 GFLOP/s"]
    assert run(("ago", [1]), ("ago", [200])) == ["1 second", "3 minutes"]


def test_advice_is_a_command_that_can_be_typed() -> None:
    answer = {"model": "tiny", "batch": {"max_rows": 128}}
    below = "find the ops below their roof: `ridgeline diagnose`"
    found = run(*(("commandOf", [below, answer, "http://h:1", key]) for key in ("", "secret")))
    assert [each["text"] for each in found] == ["ridgeline diagnose http://h:1", "ridgeline diagnose http://h:1 --api-key KEY"]
    asked = ["raise max_num_seqs", "--kv-cache-dtype fp8: fewer bytes of the cache", "more devices"]
    found = run(*(("commandOf", [what, answer, "", ""]) for what in asked))
    assert [each and each["text"] for each in found] == ["--max-num-seqs 256", "--kv-cache-dtype fp8", None]


def test_a_row_of_the_fleet() -> None:
    row = {"name": "engine 1", "state": "ok", "running": 2, "waiting": 0, "tokens_s": 51.26, "busy": 0.5, "hit_rate": 0.9,
           "kv_used": None, "mfu": 0.01, "mbu": 0.6, "step_seconds": 0.02, "slowness": 2.5, "verdict": "gray failure", "moved": 3}
    cells, line, alone = run(("fleetCells", [row]),
                             ("fleetLine", [{"tokens_s": 90, "best_tokens_s": 50, "scaling_tax": 0.1}]),
                             ("fleetLine", [{"tokens_s": 50, "best_tokens_s": 50, "scaling_tax": None}]))
    assert cells == ["engine 1", "gray failure", "2", "0", "51.3", "50 %", "90 %", "–", "1 %", "60 %", "20 ms", "2.50×", "3"]
    assert line == "90 tok/s together, best 50; scaling tax 10 %" and "two engines" in alone
