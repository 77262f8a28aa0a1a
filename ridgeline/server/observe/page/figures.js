// Numbers as text, and what the page derives from GET /roofline. Pure functions: no page, no server; tests run them under Node.
"use strict";

const FEW_ANSWERS = 20;              // below it a percentile says little
const GAP = 2.5;                     // seconds between two samples: in a longer one the engine had nothing to do
const SPANS = [30, 60, 120];         // seconds that lines over time show

function si(value, unit = "", digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return `0 ${unit}`.trim();
  const scale = Math.min(5, Math.max(-3, Math.floor(Math.log10(Math.abs(value)) / 3)));
  const prefix = ["n", "µ", "m", "", "k", "M", "G", "T", "P"][scale + 3];
  return `${Number((value / 1000 ** scale).toPrecision(digits))} ${prefix}${unit}`.trim();
}

// Without a unit nothing is milli.
const amount = (value) => (Math.abs(value) < 1000 ? String(Number(value.toPrecision(3))) : si(value));

function percent(value, digits) {
  if (!Number.isFinite(value)) return "–";
  const wanted = digits === undefined ? (value > 0 && value < 0.01 ? 2 : 1) : digits;
  return `${(100 * value).toFixed(wanted)} %`;
}

const seconds = (value) => (value === null || value === undefined ? "–" : si(value, "s"));
const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function ago(age) {
  if (age < 90) return counted(Math.round(age), "second");
  return age < 5400 ? counted(Math.round(age / 60), "minute") : counted(Math.round(age / 3600), "hour");
}

// A share of a peak. More than all of it means that the peak was measured on a busy machine; so may the server say itself.
const BEATEN = 1.02;
const utilised = (value) => (value > BEATEN ? "–" : percent(Math.min(1, value)));
const doubtful = (used) => Boolean(used.peaks_doubtful) || Math.max(used.hfu, used.mbu) > BEATEN;
const DOUBTFUL = "peaks doubtful: measured on a busy machine, and soon again";

// Stretches of a history, oldest first, with none left out: { from, to } in seconds before now, and the row, or null while the engine
// was idle. Samples come only while there is work: one after a long gap holds its work at the end of the gap.
function stretches(rows, at, busy) {
  const found = [];
  rows.forEach((row, index) => {
    const from = index ? rows[index - 1][at] : row[at] + 1, gap = from - row[at];
    if (gap <= 0) return;
    const width = gap > GAP ? Math.min(gap, Math.max(1, row[busy] * gap)) : gap;
    if (gap > width) found.push({ from, to: row[at] + width, row: null, dense: 1 });
    found.push({ from: row[at] + width, to: row[at], row, dense: gap / width });
  });
  const last = rows.length ? rows[rows.length - 1][at] : Infinity;
  if (last > GAP) found.push({ from: Math.min(last, SPANS[SPANS.length - 1]), to: 0, row: null, dense: 1 });
  return found;
}

const spanOf = (parts) => SPANS.find((each) => parts.length && parts[0].from <= each) || SPANS[SPANS.length - 1];

// The parts of the busy time, largest first, with their shares; those that are too small to see are left out.
function shares(parts, least = 0.005) {
  const total = Object.values(parts).reduce((sum, value) => sum + value, 0) || 1;
  return Object.entries(parts).map(([name, value]) => [name, value / total]).filter(([, share]) => share > least).sort((a, b) => b[1] - a[1]);
}

// The same parts in the groups of the step's time.
function groups(parts, groupOf) {
  const found = {};
  for (const [name, share] of shares(parts, 0)) found[groupOf[name] || "overhead"] = (found[groupOf[name] || "overhead"] || 0) + share;
  return found;
}

// The part of the busy time in which other programs had the engine's core.
function othersShare(parts) {
  const total = Object.values(parts).reduce((sum, value) => sum + value, 0);
  return total ? (parts.shared_machine || 0) / total : 0;
}

// A GPU's power and clock, and what lowers the clock; empty where they are not known.
function gpuLine(gpu) {
  return gpu.line ? `GPU: ${gpu.line}${gpu.limited_by ? `; ${gpu.limited_by} lowers the clock` : ""}.` : "";
}

const tooFew = (found, key) => found.count > 0 && found.count < FEW_ANSWERS && key !== "p50";
const percentile = (found, key) => (tooFew(found, key) ? "too few" : seconds(found[key]));

// What to type for a change: a command with this server's address, or an option to start the server with; null where there is neither.
function commandOf(what, answer, address, locked) {
  const option = what.match(/^(--[\w-]+ [\w.-]+):/), start = (text) => ({ label: "start the server with", text });
  if (option) return start(option[1]);
  if (what.includes("`ridgeline diagnose`")) return { label: "", text: `ridgeline diagnose ${address}${locked ? " --api-key KEY" : ""}` };
  if (/max_num_seqs/.test(what)) return start(`--max-num-seqs ${2 * Math.max(1, answer.batch.max_rows)}`);
  if (/^async_scheduling/.test(what)) return start("--async-scheduling");
  if (/^speculative_config/.test(what)) return start("--speculative-config auto");
  if (/^prefix caching/.test(what)) return start("--enable-prefix-caching");
  return null;
}
