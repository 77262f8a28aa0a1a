// The dashboard of a router: asks GET /fleet every two seconds.
"use strict";

const fleetPage = { key: "", timer: 0, failures: 0 };
const place = (id) => document.getElementById(id);

function showFleetState(text, bad) {
  place("state").textContent = text;
  place("state").className = `state ${bad ? "bad" : "ok"}`;
  document.body.classList.toggle("stale", fleetPage.failures > 0);
}

async function pollFleet() {
  clearTimeout(fleetPage.timer);
  try {
    const headers = fleetPage.key ? { Authorization: `Bearer ${fleetPage.key}` } : {};
    const reply = await fetch("fleet", { headers, cache: "no-store", signal: AbortSignal.timeout(5000) });
    place("key-form").hidden = reply.status !== 401;
    if (reply.status === 401) { showFleetState(fleetPage.key ? "wrong key" : "key needed", true); return; }
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    const answer = await reply.json(), up = answer.rows.filter((row) => row.state === "ok").length;
    fleetPage.failures = 0;
    showFleetState(`${up} of ${answer.rows.length} up`, up < answer.rows.length);
    place("policy").textContent = `routed by ${answer.policy}`;
    place("fleet").hidden = false;
    drawFleet(place("fleet"), answer, null);
  } catch (error) {
    fleetPage.failures += 1;
    showFleetState(`no answer (${error.message})`, true);
  }
  if (!document.hidden) fleetPage.timer = setTimeout(pollFleet, 2000 * Math.min(8, 2 ** fleetPage.failures));
}

place("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  fleetPage.key = place("key").value.trim();
  place("key").value = "";
  pollFleet();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) pollFleet(); });
pollFleet();
