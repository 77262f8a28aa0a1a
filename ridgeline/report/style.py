"""Colours of the dashboard and of the reports, light and dark, and the style sheet of the reports."""

from __future__ import annotations

SERIES = 6                           # colours of lines and dots
GREY = 5                             # of them; 0, 1 and 3 are those of decode, prefill and mixed steps on the dashboard

# The one list of colours: /dashboard puts it before its own style sheet.
COLOURS = """:root {
  color-scheme: light dark;
  --bg: #f4f6f9; --card: #ffffff; --ink: #17202e; --soft: #566273; --line: #e1e6ee; --faint: #eef1f6;
  --prefill: #d9741a; --decode: #1468bd; --mixed: #7a4fd0; --good: #177a4e; --bad: #bb3046;
  --compute: #d9741a; --weights: #1468bd; --kv: #12918a; --activations: #8aa6cf; --overhead: #8e99aa; --kernels: #b9798c;
  --memory: #1468bd; --others: #c9a227; --accent: #1468bd; --shadow: 0 1px 2px rgb(20 30 50 / 6%), 0 4px 16px rgb(20 30 50 / 5%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #0c1016; --card: #141a23; --ink: #e7ecf3; --soft: #9aa7b9; --line: #242e3c; --faint: #1b232f;
    --prefill: #ffab57; --decode: #5fb2ff; --mixed: #b797ff; --good: #4cc58d; --bad: #ff7a8c;
    --compute: #ffab57; --weights: #5fb2ff; --kv: #3fcabf; --activations: #5d7ba8; --overhead: #6a7688; --kernels: #b8788f;
    --memory: #5fb2ff; --others: #d8bd55; --accent: #5fb2ff; --shadow: none;
  }
}
"""

_SHEET = """
:root { --c0: var(--decode); --c1: var(--prefill); --c2: var(--kv); --c3: var(--mixed); --c4: var(--bad); --c5: var(--soft); }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 1320px; padding: 20px 20px 40px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; }
header { display: flex; align-items: center; gap: 12px; margin-bottom: 6px; }
.mark { flex: none; width: 34px; height: 23px; fill: none; stroke: var(--accent); stroke-width: 2.6; stroke-linejoin: round;
  stroke-linecap: round; }
.mark circle { fill: var(--prefill); stroke: none; }
h1 { font-size: 21px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0 0 8px; }
h3 { font-size: 14px; margin: 6px 0 2px; } p { margin: 6px 0; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; margin-top: 14px;
  box-shadow: var(--shadow); }
.quiet { color: var(--soft); } .alarm { color: var(--bad); font-weight: 600; }
.lead { font-size: 17px; } .lead b { font-size: 20px; }
code { font: 600 .9em ui-monospace, "SF Mono", Menlo, Consolas, monospace; background: var(--faint); border-radius: 4px;
  padding: 1px 4px; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 14px; margin: 6px 0; }
th, td { border-bottom: 1px solid var(--line); padding: 4px 18px 4px 0; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; vertical-align: bottom; } tr:last-child td { border-bottom: 0; }
.n { text-align: right; } td.n { white-space: nowrap; } td { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.facts td:first-child { color: var(--soft); max-width: 45vw; }
summary { cursor: pointer; color: var(--soft); margin-top: 10px; }
.beside { display: flex; flex-wrap: wrap; gap: 8px 64px; align-items: flex-start; } .beside > * { min-width: 0; }
.plots { display: grid; gap: 22px 28px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; }
.unit { color: var(--soft); font-size: 12px; margin: 2px 0 0; } .unit.x { text-align: center; padding-left: 58px; margin: 0; }
.canvas { padding: 10px 18px 22px 58px; } .canvas > svg { display: block; width: 100%; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; } svg .said { fill: var(--ink); font-weight: 600; paint-order: stroke;
  stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1; } .limit { stroke: var(--bad); stroke-width: 1.6; stroke-dasharray: 6 4; }
svg .limit-said { fill: var(--bad); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.line { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.dot { stroke: var(--card); stroke-width: .7; } .dot.pale { opacity: .38; }
.legend { list-style: none; display: flex; flex-wrap: wrap; font-size: 13px; gap: 2px 16px; margin: 4px 0 0; padding: 0; }
.legend li { display: flex; align-items: center; gap: 6px; } .legend svg { width: 26px; height: 10px; flex: none; }
@media (max-width: 640px) { body { padding: 12px 10px 28px; } section { padding: 12px; } .fine { display: none; }
  table { font-size: 13px; } th { font-size: 12px; } th, td { padding-right: 8px; } tr > :last-child { padding-right: 0; } }
@media print { body { background: none; } section { break-inside: avoid; box-shadow: none; } }
"""

# A table that is wider than the page becomes a list: a row is a paragraph, and every cell has its column's name before it.
_AS_LIST = """@media (max-width: {1}px) {{
  .{0} thead {{ display: none; }} .{0}, .{0} tbody {{ display: block; }}
  .{0} tr {{ display: block; border-bottom: 1px solid var(--line); padding: 6px 0; }} .{0} tr:last-child {{ border-bottom: 0; }}
  .{0} td {{ display: inline-block; border: 0; padding: 1px 18px 1px 0; text-align: left; white-space: normal; }}
  .{0} td::before {{ content: attr(data-label) ": "; color: var(--soft); font-weight: 400; }} .{0} td:empty {{ display: none; }}
  .{0} td:first-child {{ font-weight: 600; display: block; }} }}
"""
_DASHES = ("none", "9 5", "3 3", "12 4 3 4", "6 3", "1 5")

SHEET = COLOURS + _SHEET + _AS_LIST.format("many", 1000) + _AS_LIST.format("few", 640) + "".join(
    f".line.s{n} {{ stroke: var(--c{n}); }} .line.d{n} {{ stroke-dasharray: {dash}; }} .dot.s{n} {{ fill: var(--c{n}); }}\n"
    for n, dash in enumerate(_DASHES)
)
