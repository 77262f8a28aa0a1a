// The table of a fleet: GET /fleet of a server with several engines, or of a router. `fleetCells` is pure; tests run it under Node.
"use strict";

const FLEET_COLUMNS = ["", "state", "running", "waiting", "tok/s", "busy", "prefix hits", "KV", "MFU", "MBU", "step", "slowness", "moved"];

function fleetCells(row) {
  const share = (value) => (value === null ? "–" : percent(value, 0));
  return [
    row.name, row.verdict || row.state, String(row.running), String(row.waiting), row.tokens_s === null ? "–" : amount(row.tokens_s),
    share(row.busy), share(row.hit_rate), share(row.kv_used), share(row.mfu), share(row.mbu), seconds(row.step_seconds),
    row.slowness === null ? "–" : `${row.slowness.toFixed(2)}×`, String(row.moved),
  ];
}

function fleetLine(answer) {
  const tax = answer.scaling_tax === null ? "scaling tax: two engines with work are needed" : `scaling tax ${percent(answer.scaling_tax, 0)}`;
  return `${amount(answer.tokens_s)} tok/s together, best ${amount(answer.best_tokens_s)}; ${tax}`;
}

function drawFleet(section, answer, choose) {
  const put = (name, text) => { const made = document.createElement(name); made.textContent = text; return made; };
  section.querySelector(".fleet-line").textContent = fleetLine(answer);
  section.querySelector(".fleet-notes").replaceChildren(...answer.notes.map((note) => put("li", note)));
  section.querySelector("thead tr").replaceChildren(...FLEET_COLUMNS.map((name) => put("th", name)));
  section.querySelector("tbody").replaceChildren(...answer.rows.map((row, index) => {
    const line = document.createElement("tr"), [name, ...rest] = fleetCells(row), head = document.createElement("th");
    head.scope = "row";
    if (row.device) head.title = row.device;
    if (choose) {
      const button = put("button", name);
      button.type = "button";
      button.className = "quiet";
      button.setAttribute("aria-pressed", String(choose.chosen === index));
      button.addEventListener("click", () => choose.pick(index));
      head.append(button);
    } else head.textContent = name;
    line.className = row.verdict || row.state !== "ok" ? "bad" : "";
    line.append(head, ...rest.map((text) => put("td", text)));
    return line;
  }));
}
