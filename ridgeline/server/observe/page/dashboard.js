// The page: asks GET /roofline every second and shows what it says.
"use strict";

const PERIOD_MS = 1000;
const COLOURS = {
  weight_bandwidth: "weights", kv_bandwidth: "kv", activations: "activations", compute: "compute", implementation: "impl",
  host: "overhead", launch: "overhead", communication: "overhead", io: "overhead",
};
const NAMES = {
  weight_bandwidth: "weight bandwidth", kv_bandwidth: "KV bandwidth", compute: "compute", implementation: "implementation",
  host: "the host", launch: "launching kernels", communication: "communication", io: "I/O", queue: "the queue", idle: "nothing: idle",
};
const PARTS = {
  weight_bandwidth: "reading weights", kv_bandwidth: "reading KV", activations: "activations", compute: "computing",
  implementation: "kernels below the roof", host: "host", launch: "launch", communication: "ranks", io: "I/O",
};

const page = { key: "", timer: 0, failures: 0, last: null };
const at = (id) => document.getElementById(id);
const write = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };

function headers(more = {}) {
  return page.key ? { ...more, Authorization: `Bearer ${page.key}` } : more;
}

function askForKey(wanted) {
  at("key-form").hidden = !wanted;
  if (wanted) notice("This server wants an API key. It stays in this page's memory and is gone when the page is closed.");
}

function notice(text) {
  at("notice").hidden = !text;
  write("notice", text);
}

const plot = new Roofline(at("roofline"), (point) => write("point-note", point.text));

function points(answer) {
  const { fields, values, phases } = answer.points;
  const place = Object.fromEntries(fields.map((name, index) => [name, index]));
  return values.map((row) => {
    const get = (name) => row[place[name]];
    const point = {
      at: get("at"), phase: phases[get("phase")], rows: get("rows"), intensity: get("flops") / get("bytes"),
      rate: get("flops") / Math.max(get("device"), 1e-9),
    };
    point.text = `${point.phase}: ${get("tokens")} tokens of ${get("rows")} sequences in ${seconds(get("device"))}` +
      ` (${seconds(get("compute"))} to compute, ${seconds(get("memory"))} to move, at best); ` +
      `${si(get("flops"), "FLOP")}, ${si(get("bytes"), "B")}, ${si(point.rate, "FLOP/s")}`;
    return point;
  }).filter((point) => point.intensity > 0 && point.rate > 0);
}

function showVerdict(verdict, answer) {
  const idle = !answer.utilisation.steps;
  write("term", NAMES[verdict.term] || verdict.term);
  write("why", idle ? "No steps in the last ten seconds. Ask the model something below." : `${verdict.why}.`);
  write("headroom", idle ? "–" : `${verdict.headroom.toFixed(verdict.headroom < 10 ? 1 : 0)}×`);
  at("changes").replaceChildren(...verdict.changes.slice(0, 3).map((change) => {
    const item = document.createElement("li"), gain = document.createElement("b"), what = document.createElement("span");
    const trade = document.createElement("small");
    gain.textContent = change.gain > 1.005 ? `${change.gain.toFixed(1)}×` : "–";
    // Commands are written between backticks.
    what.append(...change.what.split("`").map((text, index) => {
      const piece = document.createElement(index % 2 ? "code" : "span");
      piece.textContent = text;
      return piece;
    }));
    trade.textContent = `check: ${change.trade_off.replaceAll("`", "")}`;
    item.append(gain, what, trade);
    return item;
  }));
  const total = Object.values(verdict.parts).reduce((sum, value) => sum + value, 0) || 1;
  const parts = Object.entries(verdict.parts).filter(([, value]) => value / total > 0.005).sort((a, b) => b[1] - a[1]);
  bar(at("parts-bar"), parts.map(([name, value]) => [COLOURS[name], value / total, `${PARTS[name]}: ${percent(value / total)}`]));
  at("parts-legend").replaceChildren(...parts.slice(0, 5).map(([name, value]) => {
    const item = document.createElement("li"), swatch = document.createElement("i"), share = document.createElement("b");
    swatch.style.background = `var(--${COLOURS[name]})`;
    share.textContent = percent(value / total, 0);
    item.append(swatch, `${PARTS[name]} `, share);
    return item;
  }));
}

function showTiles(answer) {
  const place = (name) => answer.history.fields.indexOf(name);
  const column = (name) => answer.history.values.map((row) => [row[place("at")], row[place(name)]]);
  const used = answer.utilisation;
  write("tokens", used.steps ? amount(used.tokens_per_second) : "0");
  write("tokens-note", `${amount(Math.max(0, used.computed_tokens_per_second - used.tokens_per_second))} prompt tok/s`);
  write("mbu", percent(used.mbu));
  write("mfu", percent(used.mfu));
  const waste = Object.entries(used.wasted).filter(([, share]) => share > 0.001)
    .map(([name, share]) => `${percent(share)} ${name.replace("_", " ")}`);
  write("hfu-note", `HFU ${percent(used.hfu)}${waste.length ? `; ${waste.join(", ")}` : ""}`);
  write("waiting", String(answer.batch.waiting));
  const wait = answer.batch.predicted_wait;
  write("queue-note", `${answer.batch.running} running` + (wait ? `, ${seconds(wait)} to wait` : ""));
  spark(at("spark-tokens"), column("sampled_s"));
  spark(at("spark-mbu"), column("mbu"), 0.01);
  spark(at("spark-mfu"), column("mfu"), 0.01);
  spark(at("spark-queue"), column("waiting"), 1);
}

function showSplit(answer) {
  const { compute, memory, overhead } = answer.split;
  bar(at("split-bar"), [["compute", compute], ["memory", memory], ["overhead", overhead]]
    .map(([name, share]) => [name, share, `${name}: ${percent(share)}`]));
  const place = (name) => answer.history.fields.indexOf(name);
  stacked(at("split-history"), answer.history.values.map((row) => {
    const busy = row[place("busy")], computing = row[place("compute")] * busy;
    const moving = Math.min(row[place("memory")], 1 - row[place("compute")]) * busy;
    return [row[place("at")], computing, moving, Math.max(0, busy - computing - moving)];
  }), ["compute", "memory", "overhead"]);
  const rows = Object.entries(answer.phases).map(([name, used]) => {
    const row = document.createElement("tr"), head = document.createElement("th"), dot = document.createElement("i");
    dot.className = `sw dot ${name}`;
    head.append(dot, ` ${name}`);
    row.append(head, ...[String(used.steps), amount(used.computed_tokens_per_second), percent(used.mfu), percent(used.mbu)].map(cell));
    return row;
  });
  at("phases").tBodies[0].replaceChildren(...rows);
  at("phases").hidden = !rows.length;
}

function cell(text) {
  const made = document.createElement("td");
  made.textContent = text;
  return made;
}

function showCache(answer) {
  const { kv, batch, prefix } = answer;
  blockMap(at("blocks"), kv.held, kv.cached);
  write("kv-note", `${percent(kv.used)} of ${kv.blocks.toLocaleString("en")} blocks of ${kv.block_size} tokens, ${kv.dtype}`);
  bar(at("rows-bar"), [["decode", batch.max_rows ? batch.running / batch.max_rows : 0]]);
  write("rows-note", `${batch.running} of ${batch.max_rows}`);
  bar(at("prefix-bar"), [["kv", prefix.rate]]);
  write("prefix-note", `${percent(prefix.rate, 0)} of ${amount(prefix.queries)}`);
}

function showLatency(answer) {
  for (const [id, name] of [["ttft", "first_token"], ["tpot", "per_output_token"]]) {
    const found = answer.latency[name];
    ["p50", "p90", "p99"].forEach((key, index) => { at(id).cells[index + 1].textContent = seconds(found[key]); });
  }
  const count = answer.latency.first_token.count;
  write("latency-note", count ? `${count} answers` : "no answers yet");
  const { machine } = answer, sheet = machine.data_sheet;
  const rows = [
    ["read bandwidth", si(machine.read_bytes_s, "B/s"), sheet ? si(sheet.read_bytes_s, "B/s") : "–"],
    ...Object.entries(machine.all_flops_s).map(([dtype, rate]) => [
      dtype, si(rate, "FLOP/s"), sheet && sheet.all_flops_s[dtype] ? si(sheet.all_flops_s[dtype], "FLOP/s") : "–"]),
    ["launch", seconds(machine.launch_s || null), "–"],
  ];
  at("peaks").tBodies[0].replaceChildren(...rows.map(([name, ...values]) => {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.textContent = name;
    row.append(head, ...values.map(cell));
    return row;
  }));
}

function show(answer) {
  page.last = answer;
  const { machine } = answer;
  at("state").className = `state ${answer.state === "ok" ? "ok" : "bad"}`;
  write("state", answer.state === "ok" ? (answer.batch.running ? "running" : "ready") : answer.state);
  write("model", answer.model);
  write("machine", [machine.device, machine.dtype].filter(Boolean).join(" · "));
  write("roof-note", machine.measured ? `measured ${machine.measured}` : "");
  at("sheet-legend").hidden = !machine.data_sheet;
  plot.draw(machine, points(answer));
  showVerdict(answer.verdict, answer);
  showTiles(answer);
  showSplit(answer);
  showCache(answer);
  showLatency(answer);
}

async function poll() {
  clearTimeout(page.timer);
  try {
    const reply = await fetch("roofline", { headers: headers(), cache: "no-store" });
    askForKey(reply.status === 401);
    if (reply.ok) {
      page.failures = 0;
      notice("");
      show(await reply.json());
    } else if (reply.status !== 401) {
      throw new Error(`HTTP ${reply.status}`);
    }
  } catch (error) {
    page.failures += 1;
    at("state").className = "state bad";
    write("state", "no answer");
    notice(`The server does not answer (${error.message}). Trying again.`);
  }
  const pause = PERIOD_MS * Math.min(10, 2 ** page.failures);
  if (!document.hidden) page.timer = setTimeout(poll, at("key-form").hidden ? pause : 10 * pause);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = at("key").value.trim();
  at("key").value = "";
  poll();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
window.addEventListener("resize", () => { if (page.last) show(page.last); });
poll();
