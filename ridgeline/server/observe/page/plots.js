// Drawing: SVG from plain numbers. Knows no data source and no page; colours come from the style sheet's classes.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Per second, over the FLOPs of a byte; both axes logarithmic, one grid line for each power of ten.
class Roofline {
  constructor(svg, onPoint) {
    this.svg = svg;
    this.margin = { left: 58, right: 16, top: 12, bottom: 36 };
    this.dots = [];                                      // circles, used again for every drawing
    this.shown = [];
    this.chosen = -1;                                    // with the arrow keys, counted from the newest
    for (const event of ["click", "mouseover"]) {
      svg.addEventListener(event, (hit) => { const found = this.shown[this.dots.indexOf(hit.target)]; if (found) onPoint(found); });
    }
    svg.addEventListener("keydown", (hit) => {
      const step = { ArrowLeft: 1, ArrowRight: -1 }[hit.key];
      if (!step || !this.shown.length) return;
      hit.preventDefault();
      this.chosen = Math.min(this.shown.length - 1, Math.max(0, this.chosen + step));
      onPoint(this.shown[this.shown.length - 1 - this.chosen]);
    });
  }

  draw(machine, points) {
    const box = this.svg.getBoundingClientRect();
    const width = Math.max(280, box.width), height = Math.max(200, box.height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    if (!machine.read_bytes_s) {
      this.svg.append(element("text", { class: "empty", x: width / 2, y: height / 2, "text-anchor": "middle" },
        "Peaks are measured in a quiet moment."));
      return;
    }
    const { left, right, top, bottom } = this.margin;
    const range = this.range(machine, points);
    this.x = (value) => left + ((Math.log10(value) - range.x[0]) / (range.x[1] - range.x[0])) * (width - left - right);
    this.y = (value) => height - bottom - ((Math.log10(value) - range.y[0]) / (range.y[1] - range.y[0])) * (height - top - bottom);
    this.axes(range, width, height);
    if (machine.data_sheet) this.roof(machine.data_sheet, range, "roof sheet");
    this.reach(machine, range, height - bottom);
    this.roof(machine, range, "roof");
    this.labels(machine, range, width);
    this.points(points);
    if (!points.length) {
      // Under the flat part of the roof: there is no line.
      this.svg.append(element("text", { class: "empty", x: width - right - 8, y: height * 0.5, "text-anchor": "end" }, "No steps yet"));
    }
  }

  range(machine, points) {
    const ridge = machine.flops_s / machine.read_bytes_s;
    const xs = points.map((each) => each.intensity).concat([ridge / 90, ridge * 9]);
    const highest = Math.max(machine.flops_s, machine.data_sheet ? machine.data_sheet.flops_s : 0);
    const x = [Math.floor(Math.log10(Math.min(...xs))), Math.ceil(Math.log10(Math.max(...xs)))];
    const ys = points.map((each) => each.rate).concat([machine.read_bytes_s * 10 ** x[0] * 2, highest]);
    const low = Math.log10(Math.min(...ys)) - 0.15;
    return { x, y: [low, Math.log10(highest) + 0.35] };
  }

  axes(range, width, height) {
    const { left, right, top, bottom } = this.margin;
    for (let power = range.x[0]; power <= range.x[1]; power++) {
      const at = this.x(10 ** power);
      this.svg.append(element("line", { class: "grid", x1: at, x2: at, y1: top, y2: height - bottom }));
      const anchor = power === range.x[1] ? "end" : "middle";
      this.svg.append(element("text", { class: "axis", x: at, y: height - bottom + 15, "text-anchor": anchor },
        power < 0 ? (10 ** power).toFixed(-power) : si(10 ** power, "", 1)));
    }
    for (let power = Math.ceil(range.y[0]); power <= range.y[1]; power++) {
      const at = this.y(10 ** power);
      this.svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
      this.svg.append(element("text", { class: "axis", x: left - 6, y: at + 4, "text-anchor": "end" }, si(10 ** power, "", 1)));
    }
    this.svg.append(element("text", { class: "axis", x: width - right, y: height - 4, "text-anchor": "end" }, "FLOPs per byte"));
    this.svg.append(element("text", { class: "axis", x: left + 4, y: top + 8 }, "FLOP/s"));
  }

  roof(machine, range, kind) {
    const ridge = machine.flops_s / machine.read_bytes_s;
    const first = Math.max(10 ** range.x[0], 10 ** range.y[0] / machine.read_bytes_s);
    const corners = [[first, first * machine.read_bytes_s], [ridge, machine.flops_s], [10 ** range.x[1], machine.flops_s]];
    this.svg.append(element("path", { class: kind, d: "M" + corners.map(([x, y]) => `${this.x(x)} ${this.y(y)}`).join("L") }));
  }

  reach(machine, range, floor) {
    const ridge = machine.flops_s / machine.read_bytes_s;
    const first = Math.max(10 ** range.x[0], 10 ** range.y[0] / machine.read_bytes_s);
    const [a, b, c] = [this.x(first), this.x(ridge), this.x(10 ** range.x[1])];
    this.svg.append(element("path", { class: "reach",
      d: `M${a} ${floor}L${a} ${this.y(first * machine.read_bytes_s)}L${b} ${this.y(machine.flops_s)}L${c} ${this.y(machine.flops_s)}L${c} ${floor}Z` }));
    this.svg.append(element("line", { class: "ridge", x1: b, x2: b, y1: this.y(machine.flops_s), y2: floor }));
  }

  labels(machine, range, width) {
    const ridge = machine.flops_s / machine.read_bytes_s;
    const top = this.y(machine.flops_s);
    const above = machine.data_sheet ? Math.min(top, this.y(machine.data_sheet.flops_s)) : top;
    this.svg.append(element("text", { class: "roof-label", x: width - this.margin.right - 4, y: above - 7, "text-anchor": "end" },
      `compute: ${si(machine.flops_s, "FLOP/s")} ${machine.dtype || ""}`));
    const middle = 10 ** (0.45 * Math.log10(ridge) + 0.55 * Math.max(range.x[0], range.y[0] - Math.log10(machine.read_bytes_s)));
    const x = this.x(middle), y = this.y(middle * machine.read_bytes_s);
    const slope = Math.atan2(top - y, this.x(ridge) - x) * (180 / Math.PI);
    this.svg.append(element("text", { class: "roof-label", x, y: y - 8, transform: `rotate(${slope} ${x} ${y})`, "text-anchor": "middle" },
      `memory: ${si(machine.read_bytes_s, "B/s")}`));
    const label = element("text", { class: "axis", x: this.x(ridge) + 5, y: this.y(10 ** range.y[0]) - 6 }, `ridge ${ridge.toPrecision(3)}`);
    label.append(element("title", {}, WORDS.explained.ridge));
    this.svg.append(label);
  }

  points(points) {
    const newest = points.length - 1;
    this.shown = points;
    while (this.dots.length < points.length) this.dots.push(element("circle", {}));
    points.forEach((each, index) => {
      const fresh = Math.max(0, 1 - each.at / 60), dot = this.dots[index];
      const wanted = {
        class: `point ${each.phase}${index === newest && each.at < 3 ? " newest" : ""}`, cx: this.x(each.intensity).toFixed(1),
        cy: this.y(each.rate).toFixed(1), r: (2.6 + 1.1 * Math.min(3, Math.log10(1 + each.rows))).toFixed(1), opacity: (0.22 + 0.68 * fresh).toFixed(2),
      };
      for (const [key, value] of Object.entries(wanted)) if (dot.getAttribute(key) !== value) dot.setAttribute(key, value);
    });
    this.svg.append(...this.dots.slice(0, points.length), ...this.svg.querySelectorAll(".roof-label"));   // names stay readable
  }
}

// A line over time in steps, with what is under it faintly filled, from 0 to the largest value: idle time is 0 and not a slope.
// `value` takes a row of the history. The largest value and the time are written beside it.
function spark(holder, parts, value, most, text) {
  const [svg, top, left] = holder.children, span = spanOf(parts);
  const heights = parts.map((each) => (each.row ? value(each.row, each.dense) : 0));
  const highest = Math.max(most, ...heights), place = (age) => (100 - (100 * Math.min(age, span)) / span).toFixed(2);
  const steps = parts.map((each, index) => [place(each.from), place(each.to), (40 - (37 * heights[index]) / highest).toFixed(1)]);
  const line = steps.map(([from, to, y], index) => `${index ? "V" : `M${from} `}${y}H${to}`).join("");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(...(steps.length ? [
    element("path", { class: "under", d: `${line}V40H${steps[0][0]}Z` }), element("path", { d: line }),
  ] : []));
  top.textContent = heights.some((each) => each > 0) ? text(highest) : "";    // the scale of nothing says nothing
  left.textContent = `${span} s ago`;
}

// Stacked parts over time; `shares` takes a row of the history and gives parts that add up to at most 1.
function stacked(holder, parts, shares, colours) {
  const [svg, , left] = holder.children, span = spanOf(parts), pieces = [];
  for (const { from, to, row, dense } of parts) {
    if (!row || to >= span) continue;
    let top = 100;
    shares(row, dense).forEach((share, which) => {
      const high = Math.max(0, 100 * share), right = 100 - (100 * to) / span, width = (100 * (Math.min(from, span) - to)) / span;
      top -= high;
      if (high > 0.2) {
        const piece = element("rect", { x: (right - width).toFixed(2), width: (0.9 * width).toFixed(2), y: top.toFixed(1), height: high.toFixed(1) });
        piece.style.fill = `var(--${colours[which]})`;
        pieces.push(piece);
      }
    });
  }
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(...pieces);
  left.textContent = `${span} s ago`;
}

function bar(holder, parts) {
  holder.replaceChildren(...parts.filter(([, share]) => share > 0.0005).map(([name, share, title]) => {
    const piece = document.createElement("i");
    piece.style.width = `${100 * share}%`;
    piece.style.background = `var(--${name})`;
    piece.title = title || `${percent(share)}`;
    return piece;
  }));
}

// The cache as cells: what share of each is held, cached or free shows as how far it is filled.
function blockMap(svg, held, cached) {
  const width = Math.max(200, svg.getBoundingClientRect().width), count = held.length, key = `${width}:${held}:${cached}`;
  if (svg.shown === key) return;                         // most seconds change nothing
  svg.shown = key;
  svg.replaceChildren();
  if (!count) return;
  const columns = Math.ceil(width / Math.max(5, Math.min(18, Math.sqrt((width * 128) / count))));
  const side = width / columns, size = side - 1.5;
  svg.setAttribute("viewBox", `0 0 ${width} ${side * Math.ceil(count / columns)}`);
  for (let index = 0; index < count; index++) {
    const x = (index % columns) * side, y = Math.floor(index / columns) * side;
    svg.append(element("rect", { class: "free", x, y, width: size, height: size, rx: 1.5 }));
    const full = held[index] / 100, kept = cached[index] / 100;
    if (kept > 0) svg.append(element("rect", { class: "cached", x, y, width: size, height: size, rx: 1.5, opacity: 0.15 + 0.45 * kept }));
    if (full > 0) svg.append(element("rect", { class: "held", x, y: y + size * (1 - full), width: size, height: size * full, rx: 1.5 }));
  }
}
