"""An evaluation's result as a text table."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    against = f" against {result['reference']}" if "reference" in result else ""
    lines = [f"{result['model']}{against}: passages of {result['context']} tokens, seed {result['seed']}", ""]
    lines += _slices(result)
    if "by_position" in result:
        lines += ["", *_positions(result["by_position"]), "", *_worst(result["worst_decile"])]
    if "needle" in result:
        lines += ["", *_needle(result["needle"])]
    if "choices" in result:
        found = result["choices"]
        lines += ["", f"choices: {found['accuracy']:.1%} ± {found['error']:.1%} of {found['questions']} questions right, "
                      f"{found['accuracy_by_byte']:.1%} by byte; chance {found['chance']:.1%}"]
    for verdict in result.get("gate", ()):
        lines += ["", f"gate {verdict['figure']}: worst is {verdict['worst']} with {verdict['value']:.5g}, the limit is "
                      f"{verdict['limit']:g}: {'passed' if verdict['passed'] else 'FAILED'}"]
    return "\n".join(lines)


def _slices(result: dict[str, Any]) -> list[str]:
    compared = "reference" in result
    head = f"{'slice':<14}{'tokens':>8}{'perplexity':>12}{'±':>8}{'bits/byte':>11}"
    head += f"{'reference':>11}{'KL':>10}{'KL P99':>10}{'top-1':>9}" if compared else ""
    lines = [head]
    for name, found in result["slices"].items():
        error, bits = found["perplexity_error"], found["bits_per_byte"]
        line = f"{name:<14}{found['tokens']:>8}{_short(found['perplexity']):>12}"
        line += f"{_short(error, 2):>8}" if error is not None else f"{'–':>8}"
        line += f"{bits:>11.3f}" if bits is not None else f"{'–':>11}"
        if compared:
            line += f"{_short(found['reference_perplexity']):>11}{found['kl']:>10.2g}{found['kl_p99']:>10.2g}"
            line += f"{found['top1']:>9.2%}"
        lines.append(line)
    if compared:
        found = result["all"]
        lines.append(f"{'all':<14}{found['tokens']:>8}{'':>12}{'':>8}{'':>11}{_short(found['reference_perplexity']):>11}"
                     f"{found['kl']:>10.2g}{found['kl_p99']:>10.2g}{found['top1']:>9.2%}")
    return lines


def _short(value: float, digits: int = 4) -> str:
    """Fits its column: perplexities of a model that guesses are in the millions."""
    return f"{value:.3f}" if value < 1000 else f"{value:.{digits}g}"


def _positions(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'tokens before':<14}{'tokens':>8}{'KL':>10}{'top-1':>9}"]
    for row in rows:
        between = f"{row['from']}–{row['to']}" if row["to"] > row["from"] else str(row["from"])
        lines.append(f"{between:<14}{row['tokens']:>8}{row['kl']:>10.2g}{row['top1']:>9.2%}")
    return lines


def _worst(found: dict[str, Any]) -> list[str]:
    lines = [f"worst tenth of the passages: KL {found['kl']:.3g}"]
    for row in found["passages"]:
        lines.append(f"  {row['slice']} {row['number']}: KL {row['kl']:.3g}, top-1 {row['top1']:.2%}: “{row['begins']}…”")
    return lines


def _needle(found: dict[str, Any]) -> list[str]:
    depths = sorted({cell["depth"] for cell in found["cells"]})
    lines = [f"needle: {found['found']:.0%} found, {found['picked']:.0%} picked, of {found['trials']}; found (picked) by depth",
             f"{'length':<14}" + "".join(f"{depth:>14.0%}" for depth in depths)]
    for length in sorted({cell["length"] for cell in found["cells"]}):
        row = {cell["depth"]: cell for cell in found["cells"] if cell["length"] == length}
        cells = [f"{row[depth]['found']:.0%} ({row[depth]['picked']:.0%})" for depth in depths]
        lines.append(f"{length:<14}" + "".join(f"{cell:>14}" for cell in cells))
    return lines
