"""The reports' shared parts: text is escaped and never cut, axes keep their size, lines can be told apart, limits are drawn."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from chromium import BINARY, Browser

from ridgeline.bench.load.latency import Outcome, figures, parse_slo, timeline
from ridgeline.bench.load.serve_page import report
from ridgeline.diagnose.as_page import diagnosis_page
from ridgeline.plan import plan_report
from ridgeline.plan.operation import Slo, Traffic
from ridgeline.plan.plan_page import page as plan_page
from ridgeline.plan.prediction import Setup
from ridgeline.plan.public_models import find_model
from ridgeline.report import web_page
from ridgeline.report.plots import HEIGHT, Limit, Note, Series, axis, plot
from ridgeline.report.style import COLOURS, SHEET
from ridgeline.report.words import EXPLAINED, GROUP_OF, GROUPS, PARTS, TERMS
from ridgeline.roofline import verdict
from ridgeline.sizes.hardware import find_device

EVIL = "<script>alert(1)</script> & \"quotes\" 'too'"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scaled_text = 0             # <text> inside an SVG with a viewBox, whose letters would shrink with it
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.found.append((tag, found))
        if tag == "svg":
            self.open.append("scaled" if "viewbox" in found else "")
        self.scaled_text += tag == "text" and "scaled" in self.open

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg":
            self.open.pop()

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


# -- text and tables ---------------------------------------------------------------------------------------------------


def test_text_is_escaped_everywhere() -> None:
    made = web_page.page(EVIL, [web_page.paragraph(EVIL)], [(EVIL, [
        web_page.table([{EVIL: EVIL}]), web_page.facts({EVIL: {EVIL: EVIL}}), web_page.folded(EVIL, web_page.verbatim(EVIL)),
        plot(EVIL, [Series(EVIL, [(1, 1)], "dots", [EVIL]), Series("b", [(1, 1)])], axis(EVIL, [1]), axis(EVIL, [1]),
             [Limit(1, EVIL)], [Note((1, 1), EVIL)]),
    ])])
    assert "<script" not in made and made.count("&lt;script&gt;") >= 14


def test_a_page_may_load_nothing_and_run_nothing() -> None:
    made = web_page.page("x", [], [("y", ["z"]), ("empty", ["", ""])])
    digest = base64.b64encode(hashlib.sha256(SHEET.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in made and f"<style>{SHEET}</style>" in made
    assert "<h2>empty" not in made                       # a section without content
    assert "url(" not in SHEET and "@import" not in SHEET and "prefers-color-scheme: dark" in SHEET


def test_backticks_become_code() -> None:
    assert web_page.prose("run `ridgeline diagnose <b>` now") == "run <code>ridgeline diagnose &lt;b&gt;</code> now"
    assert web_page.prose("one ` alone") == "one ` alone"
    assert web_page.prose("`a` and one ` alone") == "<code>a</code> and one ` alone"


def test_numbers_are_aligned_to_the_right_and_text_to_the_left() -> None:
    rows = [{"what": "a change", "gain": "1.71×", "share": "83%", "ms": 3.5, "note": "3 of 4"},
            {"what": "another", "gain": "unknown", "share": "", "ms": None, "note": "7"}]
    cells = Elements(web_page.table(rows)).all("td")
    assert [cell.get("class") for cell in cells[:5]] == [None, "n", "n", "n", None]
    assert [cell["data-label"] for cell in cells[:5]] == list(rows[0])
    assert "white-space: nowrap" in SHEET and SHEET.count("nowrap") == 1         # of numbers alone: text wraps, and is not cut


@pytest.mark.parametrize(("columns", "size"), [(3, "small"), (9, "few"), (14, "many")])
def test_a_table_becomes_a_list_where_it_does_not_fit(columns: int, size: str) -> None:
    made = web_page.table([{f"c{place}": "12345" for place in range(columns)}])
    assert Elements(made).all("table")[0]["class"] == size
    assert size == "small" or f".{size} td::before {{ content: attr(data-label)" in SHEET


def test_long_text_does_not_make_a_table_wide() -> None:
    made = web_page.table([{"change": "words that can be wrapped " * 20, "gain": "1.2×"}])
    assert Elements(made).all("table")[0]["class"] == "small"


def test_options_are_rows_and_not_a_dict() -> None:
    made = web_page.facts({"fields": {"temperature": 0.0, "stream_options": {"include_usage": True}}, "none": None, "empty": "",
                           "lengths": [1, 2], "seed": 0})
    assert "<td>fields: temperature</td><td>0.0</td>" in made and "{" not in made
    assert "<td>fields: stream options: include usage</td><td>yes</td>" in made
    assert "<td>lengths</td><td>1, 2</td>" in made and "<td>seed</td><td>0</td>" in made
    assert "none" not in made and "empty" not in made


# -- plots -------------------------------------------------------------------------------------------------------------


def drawn(*series: Series, limits: tuple[Limit, ...] = ()) -> str:
    return plot("title", series, axis("seconds", [0, 10]), axis("ms", [1, 100], log=True), limits)


def test_letters_and_dots_do_not_shrink_with_the_page() -> None:
    parsed = Elements(drawn(Series("a", [(0, 1), (10, 100)], "line+dots"), limits=(Limit(50, "SLO"),)))
    assert parsed.scaled_text == 0 and parsed.all("text")
    assert all(str(each["x"]).endswith("%") or each["x"] == "-8" for each in parsed.all("text"))
    assert all(str(each["cx"]).endswith("%") for each in parsed.all("circle")[:2])
    sizes = [float(size) for size in re.findall(r"svg[^{}]*text[^{}]*\{[^}]*font-size: ([\d.]+)px", SHEET)]
    assert sizes and min(sizes) >= 11


def test_lines_on_top_of_each_other_are_named_as_one() -> None:
    line = [(0.0, 1.0), (10.0, 100.0)]
    nearly = [(x + 0.001, y) for x, y in line]
    made = drawn(Series("TTFT", line), Series("TTFT, from sending", nearly), Series("E2EL", [(0, 5), (10, 5)]))
    assert made.count('<path class="line') == 2 * 2      # each in the plot and in the legend
    assert "TTFT = TTFT, from sending</li>" in made
    assert {"s0 d0", "s1 d1"} == set(re.findall(r'class="line (s\d d\d)"', made))       # two colours, two kinds of dashes


def test_dots_stay_apart_and_empty_series_are_not_in_the_legend() -> None:
    made = drawn(Series("a", [(1, 1)], "dots"), Series("b", [(1, 1)], "dots"), Series("c", []))
    assert "a = b" not in made and made.count("<li>") == 2


def test_a_limit_is_a_line_with_its_words() -> None:
    across, up = drawn(Series("a", [(1, 1)]), limits=(Limit(5, "SLO 5 s", across=True),)), drawn(limits=(Limit(10, "SLO 10 ms"),))
    assert 'class="limit" x1="50.00%" x2="50.00%"' in across and ">SLO 5 s</text>" in across
    assert f'class="limit" x1="0%" x2="100%" y1="{HEIGHT / 2:.1f}"' in up and ">SLO 10 ms</text>" in up


# -- colours -----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_every_ground(scheme: int) -> None:
    """WCAG's 4.5 to 1, for the colours that text has on the dashboard and in the reports."""
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", COLOURS.split("@media")[scheme]))
    for text, ground in [
        *((text, ground) for text in ("ink", "soft", "good", "bad") for ground in ("bg", "card", "faint")),
        ("card", "accent"), ("card", "bad"), ("card", "ink"),
    ]:
        low, high = sorted((luminance(colours[text]), luminance(colours[ground])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


# -- words -------------------------------------------------------------------------------------------------------------


def test_every_term_and_part_of_the_verdict_has_its_words() -> None:
    assert set(verdict.TERMS) <= set(TERMS)
    parts = verdict.Window(seconds=1, busy=1, device=1).parts()
    assert set(parts) <= set(PARTS) and set(parts) <= set(GROUP_OF)
    assert {GROUP_OF[name] for name in parts} | {"others"} == set(GROUPS)
    assert {GROUP_OF[name] for name in verdict.OVERHEADS} <= {"overhead", "others"}
    assert GROUP_OF[verdict.IMPLEMENTATION] == "kernels"
    # The verdict's "no overhead explains it" and the page's words for that term are not the same word.
    assert TERMS[verdict.IMPLEMENTATION] == PARTS[verdict.IMPLEMENTATION] == GROUPS["kernels"] != GROUPS["overhead"]
    assert all(f"--{name}:" in COLOURS for name in GROUPS) and {"MFU", "HFU", "MBU", "ridge"} <= set(EXPLAINED)


# -- a whole report ----------------------------------------------------------------------------------------------------


def diagnosed(**more: Any) -> str:
    outcome = Outcome(0.0, sent=0.0, ended=2.0, tokens_in=8, tokens_out=3)
    outcome.events.extend([0.5, 1.0, 2.0])
    spread = {"p50": 500.0, "p90": 500.0, "p99": 500.0, "max": 500.0}
    tree = {
        "application": {"completed": 1, "output_throughput": 6.2, "input_throughput": 4.0, "slo": "ttft:300,tpot:80",
                        "ttft_ms": spread, "tpot_ms": spread, "request_goodput": 0.0, "slo_attainment": 0.0, "preemptions": 0},
        "steps": {"seconds": 2.0, "lost": 0.5, "phases": {}, "slowest": {"steps": []}},
        "verdict": {"term": "implementation", "why": "steps reach 27% of their roof", "headroom": 3.8,
                    "parts": {"implementation": 1.5, "host": 0.1}},
        "remedies": [{"what": "tune tiles: `ridgeline bench ops`", "gain": 1.71, "from": "trace", "why": "x",
                      "trade_off": "none"}],
        "machine": {"device": "Some Processor x2", "read_bytes_s": 2e10, "flops_s": 2e11, "load": 0.5},
    } | more
    points = [{"start": 0.0, "seconds": 0.1, "device": 0.1, "phase": phase, "tokens": 8, "rows": 1, "flops": flops, "bytes": 1e8}
              for phase, flops in (("prefill", 1e10), ("decode", 2e8))]
    return diagnosis_page(tree, "a model, diagnosed", {"model": "a model", "options": {"max_model_len": 89}}, [outcome], points)


def served() -> str:
    points, runs = [], []
    for rate in (1.0, 2.0):
        outcomes = []
        for number in range(4):
            outcome = Outcome(number / rate, sent=number / rate, ended=number / rate + 1, tokens_in=48, tokens_out=3)
            outcome.events.extend([number / rate + 0.2 * rate, number / rate + 0.5, number / rate + 0.9])
            outcomes.append(outcome)
        lag = {"p99": 1.0}
        client = {"is_bottleneck": False, "reasons": [], "loop_lag_ms": lag, "send_lag_ms": lag, "cpu_share": 0.1}
        points.append({
            "setting": {"request_rate": rate, "max_concurrency": None, "input_len": "48", "output_len": "24"},
            "process": "poisson", "runs": 1, "figures": figures(outcomes, parse_slo(["ttft:300"])) | {"client": client},
            "timeline": timeline(outcomes),
        })
        runs.append(outcomes)
    made = {
        "date": "2026-01-01", "quality": "exact", "commit": "0" * 40, "versions": {"ridgeline": "1"},
        "machine": {"cpu": "Some Processor", "cores": 2},
        "workload": {"url": "http://127.0.0.1:8000", "endpoint": "/v1/completions", "model": "a model", "slo": "ttft:300",
                     "tokens_counted_by": "usage", "fields": {"ignore_eos": True, "stop": ["a" * 300]}},
        "figures": {"points": points, "best_goodput": {"setting": points[0]["setting"], "request_goodput": 0.0}},
    }
    return report(made, runs)


def test_a_load_report_draws_its_slo_and_says_when_none_met_it() -> None:
    made = served()
    assert "Client: Some Processor, 2 cores." in made and made.count("SLO TTFT 300 ms") == 1 + 2 * 2
    assert "No request met the SLO ttft:300 (ms), at any setting." in made and "{'" not in made
    assert "E2EL = E2EL, from sending</li>" in made      # sent when they were to be sent


def test_a_diagnosis_names_its_machine_its_roofs_and_its_slo() -> None:
    made = diagnosed()
    assert "Measured on Some Processor x2." in made and "<b>Bound by kernels below their roof.</b>" in made
    assert "memory 20.0 GB/s</text>" in made and "compute 200.0 GFLOP/s</text>" in made
    assert "SLO TTFT 300 ms" in made and "SLO TPOT 80 ms" in made
    assert "<code>ridgeline bench ops</code>" in made and "<td>max model len</td><td>89</td>" in made
    assert "<td>output tok/s</td><td>6.2</td>" in made   # and not in a column of milliseconds
    assert "Other programs used the CPU for 25% of the time." in made


def test_an_idle_server_has_no_distance_to_the_roof() -> None:
    made = diagnosed(verdict={"term": "idle", "why": "no steps", "headroom": 1.0, "parts": {}})
    assert "<b>Idle.</b> No steps." in made and "as fast if every op" not in made


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no Chromium here")
class TestBrowser:
    @pytest.fixture(scope="class")
    def browser(self) -> Iterator[Browser]:
        with Browser() as made:
            yield made

    @pytest.fixture(scope="class")
    def reports(self) -> dict[str, str]:
        question = plan_report.Question(
            Setup(model=find_model("llama-3.1-8b"), device=find_device("H100"), weights="int4"), Traffic(1024, 256), 1, price=2.0,
            slo=Slo(0.5, 0.02), rate=20.0,
        )
        told = plan_report.answer(question) | {"objectives": plan_report.objectives(question)} | plan_report.fronts(question)
        return {"diagnose": diagnosed(), "plan": plan_page(told), "serve": served()}

    @pytest.mark.parametrize("name", ["diagnose", "plan", "serve"])
    @pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (820, "light"), (1400, "dark")])
    def test_nothing_is_cut_at_any_width(
        self, browser: Browser, reports: dict[str, str], tmp_path: Path, name: str, width: int, scheme: str
    ) -> None:
        (tmp_path / "page.html").write_text(reports[name])
        shown = browser.page(width, 900, scheme)
        shown.open(f"file://{tmp_path}/page.html")
        assert shown.errors == [] and shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        outside = """[...document.querySelectorAll('body *')].filter((each) => { const box = each.getBoundingClientRect();
          return box.width && (box.right > innerWidth + 1 || box.left < -1); }).map((each) => each.outerHTML.slice(0, 80))"""
        assert shown.evaluate(outside) == []
        assert shown.evaluate("Math.min(...[...document.querySelectorAll('svg text')].map((each) => "
                              "parseFloat(getComputedStyle(each).fontSize) * (each.getScreenCTM().d)))") >= 11
