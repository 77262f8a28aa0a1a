// The page: asks GET /roofline every second and shows what it says.
"use strict";

const PERIOD_MS = 1000, PATIENCE_MS = 5000;
const COLOURS = { weight_bandwidth: "weights", kv_bandwidth: "kv", activations: "activations" };        // others have their group's
const colour = (part) => COLOURS[part] || WORDS.groupOf[part] || "overhead";
const named = (words, key) => words[key] || key.replaceAll("_", " ");

const page = { key: "", timer: 0, failures: 0, last: null, at: 0, problem: "", engine: 0 };
const at = (id) => document.getElementById(id);
const write = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };

function made(name, text, kind) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function headers(more = {}) {
  return page.key ? { ...more, Authorization: `Bearer ${page.key}` } : more;
}

function askForKey(wanted) {
  at("key-form").hidden = !wanted;
  if (!wanted) return;
  const refused = Boolean(page.key);
  page.key = "";
  notice(refused ? "The server refused this API key: it knows no such key. Try another."
    : "This server wants an API key. It stays in this page's memory and is gone when the page is closed.", refused);
  showState(refused ? "wrong key" : "key needed", "bad");
  if (refused || !page.last) at("key").focus();
}

// `age` changes every second: it is shown, and not read aloud.
function notice(text, bad = false, age = "") {
  at("notice").hidden = !text;
  at("notice").className = `notice${bad ? " bad" : ""}`;
  write("notice-text", text);
  write("notice-age", age);
}

function showState(text, kind) {
  if (at("state").className !== `state ${kind}`) at("state").className = `state ${kind}`;
  write("state", text);
}

const plot = new Roofline(at("roofline"), (point) => write("point-note", point.text()));

function points(answer) {
  const { fields, values, phases } = answer.points;
  const place = Object.fromEntries(fields.map((name, index) => [name, index]));
  return values.map((row) => {
    const get = (name) => row[place[name]], rate = get("flops") / Math.max(get("device"), 1e-9);
    return {
      at: get("at"), phase: phases[get("phase")], rows: get("rows"), intensity: get("flops") / get("bytes"), rate,
      text: () => `${phases[get("phase")]}: ${counted(get("tokens"), "token")} of ${counted(get("rows"), "sequence")} in ${seconds(get("device"))}` +
        ` (${seconds(get("compute"))} to compute, ${seconds(get("memory"))} to move, at best); ` +
        `${si(get("flops"), "FLOP")}, ${si(get("bytes"), "B")}, ${si(rate, "FLOP/s")}`,
    };
  }).filter((point) => point.intensity > 0 && point.rate > 0);
}

// Words between backticks are commands.
function withCode(text) {
  return text.split("`").map((piece, index) => made(index % 2 ? "code" : "span", piece));
}

function advice(change, answer) {
  const item = made("li"), what = made("span"), command = commandOf(change.what, answer, location.origin, page.key);
  const gain = change.gain > 1.005 ? `${change.gain.toFixed(1)}×` : "–";
  what.append(...withCode(command ? change.what.replace(/:? *`ridgeline diagnose`|^--[^:]+: /, "") : change.what));
  item.append(made("b", gain), what);
  if (command) {
    const line = made("span", undefined, "command");
    line.append(...(command.label ? [made("span", command.label)] : []), made("code", command.text), copyButton(() => command.text));
    item.append(line);
  }
  if (change.trade_off && change.trade_off !== "none") {
    const trade = made("small", "check: ");
    trade.append(...withCode(change.trade_off));
    item.append(trade);
  }
  return item;
}

function showVerdict(verdict, answer) {
  const idle = verdict.term === "idle", none = !answer.utilisation.steps, others = othersShare(verdict.parts);
  write("term", named(WORDS.terms, verdict.term));
  write("why", none ? "No steps in the last ten seconds." : `${verdict.why}.`);
  at("ask").hidden = !none || !at("chat").hidden;
  at("others").hidden = others < 0.1 || none || verdict.term === "shared_machine";          // the verdict says it then
  at("advice").hidden = idle || !verdict.changes.length;
  write("others", `Shared machine: other programs had the engine's core for ${percent(others, 0)} of the busy time.`);
  at("gpu").hidden = !gpuLine(answer.gpu) || idle;
  write("gpu", gpuLine(answer.gpu));
  at("parts").hidden = idle;
  write("headroom", `${verdict.headroom.toFixed(verdict.headroom < 10 ? 1 : 0)}×`);
  const key = JSON.stringify([verdict.changes, answer.batch.max_rows, page.key !== ""]);
  if (page.advice !== key) {                             // a button under a finger is not replaced
    page.advice = key;
    at("changes").replaceChildren(...verdict.changes.slice(0, 3).map((change) => advice(change, answer)));
  }
  const parts = shares(verdict.parts);
  bar(at("parts-bar"), parts.map(([name, share]) => [colour(name), share, `${named(WORDS.parts, name)}: ${percent(share)}`]));
  legend("parts-legend", parts.slice(0, 5).map(([name, share]) => [colour(name), named(WORDS.parts, name), share]));
}

function legend(id, parts) {
  at(id).replaceChildren(...parts.map(([name, text, share]) => {
    const item = made("li"), swatch = made("i");
    swatch.style.background = `var(--${name})`;
    item.append(swatch, `${text} `, made("b", percent(share, 0)));
    return item;
  }));
}

function columns(answer) {
  return Object.fromEntries(answer.history.fields.map((name, index) => [name, index]));
}

function showTiles(answer, parts) {
  const place = columns(answer), used = answer.utilisation, running = answer.batch.running;
  const quiet = !running && (!parts.length || !parts[parts.length - 1].row);
  for (const each of document.querySelectorAll(".window")) each.textContent = `last ${Math.round(answer.window.seconds)} s`;
  write("tokens", quiet || !used.steps ? "0" : amount(used.tokens_per_second));
  const prompts = amount(Math.max(0, used.computed_tokens_per_second - used.tokens_per_second));
  write("tokens-note", quiet && used.steps ? `idle; ${amount(used.tokens_per_second)} while there was work` : `${prompts} prompt tok/s`);
  const doubt = doubtful(used);
  write("mbu", doubt ? "–" : utilised(used.mbu));
  write("mbu-note", doubt ? DOUBTFUL : quiet && used.steps ? "while there was work" : "of measured bandwidth");
  write("mfu", doubt ? "–" : utilised(used.mfu));
  const waste = Object.entries(used.wasted).filter(([, share]) => share > 0.001)
    .map(([name, share]) => `${percent(share)} ${name.replace("_", " ")}`);
  write("hfu-note", doubt ? DOUBTFUL : `HFU ${utilised(used.hfu)}${waste.length ? `; ${waste.join(", ")}` : ""}`);
  write("waiting", String(answer.batch.waiting));
  const wait = answer.batch.predicted_wait;
  write("queue-note", `${running} running` + (wait ? `, ${seconds(wait)} to wait` : ""));
  const whole = (value) => percent(value, value < 0.1 ? 1 : 0);
  spark(at("spark-tokens"), parts, (row, dense) => row[place.sampled_s] * dense, 1, amount);
  spark(at("spark-mbu"), parts, (row) => Math.min(1, row[place.mbu]), 0.01, whole);
  spark(at("spark-mfu"), parts, (row) => Math.min(1, row[place.mfu]), 0.01, whole);
  spark(at("spark-queue"), parts, (row) => row[place.waiting], 1, amount);
}

function showSplit(answer, parts) {
  const place = columns(answer), found = groups(answer.verdict.parts, WORDS.groupOf);
  const order = Object.keys(WORDS.groups), shown = order.filter((name) => found[name] !== undefined);
  bar(at("split-bar"), shown.map((name) => [name, found[name], `${WORDS.groups[name]}: ${percent(found[name])}`]));
  legend("split-legend", order.filter((name) => name !== "others" || found[name]).map((name) => [name, WORDS.groups[name], found[name] || 0]));
  stacked(at("split-history"), parts, (row, dense) => {
    const busy = Math.min(1, row[place.busy] * dense), compute = row[place.compute], memory = Math.min(row[place.memory], 1 - compute);
    const others = Math.min(row[place.others], 1 - compute - memory), overhead = Math.min(row[place.overhead], 1 - compute - memory - others);
    return [compute, memory, 1 - compute - memory - overhead - others, overhead, others].map((share) => share * busy);
  }, ["compute", "memory", "kernels", "overhead", "others"]);
  const rows = Object.entries(answer.phases).map(([name, used]) => {
    const row = made("tr"), head = made("th"), dot = made("i", undefined, `sw dot ${name}`);
    head.append(dot, ` ${name}`);
    row.append(head, ...[String(used.steps), amount(used.computed_tokens_per_second), utilised(used.mfu), utilised(used.mbu)]
      .map((text) => made("td", text)));
    return row;
  });
  at("phases").tBodies[0].replaceChildren(...rows);
  at("phases").hidden = !rows.length;
}

function showCache(answer) {
  const { kv, batch, prefix } = answer;
  blockMap(at("blocks"), kv.held, kv.cached);
  write("kv-note", `${percent(kv.used)} of ${counted(kv.blocks, "block")} of ${kv.block_size} tokens, ${kv.dtype}`);
  bar(at("rows-bar"), [["decode", batch.max_rows ? batch.running / batch.max_rows : 0]]);
  write("rows-note", `${batch.running} of ${batch.max_rows}`);
  bar(at("prefix-bar"), [["kv", prefix.rate]]);
  const { drafts } = answer;
  at("drafts-meter").hidden = !drafts.verified;
  bar(at("drafts-bar"), [["kv", drafts.rate]]);
  write("drafts-note", `${percent(drafts.rate, 0)} of ${amount(drafts.verified)} drafts`);
  write("prefix-note", `${percent(prefix.rate, 0)} of ${amount(prefix.queries)} prompt tokens`);
}

function showLatency(answer) {
  for (const [id, name] of [["ttft", "first_token"], ["tpot", "per_output_token"]]) {
    ["p50", "p90", "p99"].forEach((key, index) => { at(id).cells[index + 1].textContent = percentile(answer.latency[name], key); });
  }
  const { count } = answer.latency.first_token;
  const few = count < FEW_ANSWERS ? `: too few for percentiles, which take ${FEW_ANSWERS}` : "";
  write("latency-note", count ? counted(count, "answer") + few : "no answers yet");
  const { machine } = answer, sheet = machine.data_sheet;
  const rows = [
    ["read bandwidth", si(machine.read_bytes_s, "B/s"), sheet && si(sheet.read_bytes_s, "B/s")],
    ...Object.entries(machine.all_flops_s).map(([dtype, rate]) => [
      dtype, si(rate, "FLOP/s"), sheet && (sheet.all_flops_s[dtype] ? si(sheet.all_flops_s[dtype], "FLOP/s") : "–")]),
    ["kernel launch", seconds(machine.launch_s || null), sheet && "–"],
  ];
  at("sheet-column").hidden = !sheet;
  at("peaks").tBodies[0].replaceChildren(...rows.map(([name, ...values]) => {
    const row = made("tr");
    row.append(made("th", name), ...values.filter((value) => value !== null).map((value) => made("td", value)));
    return row;
  }));
}

function show(answer) {
  page.last = answer;
  const { machine } = answer, parts = stretches(answer.history.values, columns(answer).at, columns(answer).busy);
  write("model", answer.model);
  write("chat-model", answer.model);
  write("machine", [machine.device, machine.dtype].filter(Boolean).join(" · "));
  write("quality", answer.quality);
  write("roof-note", machine.measured ? `measured ${machine.measured}` : "");
  at("sheet-legend").hidden = !machine.data_sheet;
  plot.draw(machine, points(answer));
  showVerdict(answer.verdict, answer);
  showTiles(answer, parts);
  showSplit(answer, parts);
  showCache(answer);
  showLatency(answer);
}

function showHealth(answer) {
  const fine = answer.state === "ok";
  showState(fine ? (answer.batch.running ? "running" : "ready") : answer.state, fine ? "ok" : "bad");
}

// A server that does not answer is not green: what is shown is grey, with its age, until it answers again.
function showSilence() {
  document.body.classList.toggle("stale", page.failures > 0);
  if (!page.failures) return;
  showState("no answer", "bad");
  const age = page.last ? `The figures are ${ago((Date.now() - page.at) / 1000)} old.` : "";
  notice(`The server does not answer (${page.problem}). Trying again.`, true, age);
}

// With several engines, the rest of the page is about the one that was chosen in the table.
async function showFleet(engines) {
  at("fleet").hidden = engines < 2;
  if (engines < 2) return;
  const reply = await fetch("fleet", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (reply.ok) drawFleet(at("fleet"), await reply.json(), { chosen: page.engine, pick: (index) => { page.engine = index; poll(); } });
}

async function poll() {
  clearTimeout(page.timer);
  try {
    const reply = await fetch(page.engine ? `roofline?engine=${page.engine}` : "roofline", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (reply.status !== 401 && !reply.ok) throw new Error(`HTTP ${reply.status}`);
    const answer = reply.ok ? await reply.json() : null;
    page.failures = 0;
    showSilence();
    if (answer) {
      page.at = Date.now();
      notice("");
      showHealth(answer);
      show(answer);
      await showFleet(answer.engines);
    }
    if (reply.status === 401 || !at("key-form").hidden) askForKey(reply.status === 401);
  } catch (error) {
    page.failures += 1;
    page.problem = error.name === "TimeoutError" ? `nothing within ${PATIENCE_MS / 1000} s` : error.message;
    showSilence();
  }
  const pause = PERIOD_MS * Math.min(10, 2 ** page.failures);
  if (!document.hidden && at("key-form").hidden) page.timer = setTimeout(poll, pause);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = at("key").value.trim();
  at("key").value = "";
  if (page.key) poll();
});
for (const each of document.querySelectorAll("[data-hint]")) {
  const said = WORDS.explained[each.dataset.hint];
  each.dataset.say = said;
  each.tabIndex = 0;
  each.setAttribute("aria-label", `${each.textContent}: ${said}`);
}
at("words").append(...Object.entries(WORDS.explained).flatMap(([word, said]) => [made("dt", word), made("dd", said)]));
setInterval(() => { if (page.failures) showSilence(); }, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
window.addEventListener("resize", () => { if (page.last) show(page.last); });
poll();
