// Asks for dashboard/data again and again, and shows it. What is old is shown as old.

import { amount, byId, bytes, el, percent, say, seconds, span, urlOf } from "./common.js";
import { periods, spark } from "./spark.js";

const EVERY_MS = 1000;
const TIMEOUT_MS = 10000;
const OLD_MS = 5000;
const MARKS = { ready: "●", draining: "◐", starting: "○", drained: "◌", restarting: "◐", turning: "◐", silent: "▲", lost: "✕" };
const LATENCIES = {
  time_to_first_token: "First token",
  inter_token: "Between chunks of tokens",
  end_to_end: "End to end",
  kv_pull: "KV transfer",
};

let board = null;
let toldAt = 0;
let resumedAt = 0; // when it began to ask again, after a pause or out of sight
let timer = 0;
let isPaused = false;
let failure = "";

async function ask() {
  clearTimeout(timer);
  try {
    const answer = await fetch(urlOf("dashboard/data"), {
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (!answer.ok) throw new Error(`it answers ${answer.status}`);
    board = await answer.json();
    toldAt = Date.now();
    failure = "";
    show();
  } catch (error) {
    failure = error.message.startsWith("it answers") ? error.message : "it does not answer";
  }
  showAge();
  if (!isPaused && !document.hidden) timer = setTimeout(ask, EVERY_MS);
}

function show() {
  document.title = `${board.model} – kvlane`;
  say(byId("model"), board.model);
  for (const id of ["load-window", "latency-window"]) say(byId(id), `the last ${span(board.window_s)}`);
  say(byId("told-by"), `kvlane ${board.version}, told by ${board.told_by}.`);
  showTiles();
  rows(byId("workers"), board.workers, workerCells);
  const { classList } = byId("all-workers");
  classList.toggle("no-drafter", !board.workers.some((worker) => worker.drafter));
  classList.toggle("no-gpu", !board.workers.some((worker) => worker.card));
  rows(byId("routers"), board.routers, routerCells);
  rows(byId("latencies"), Object.entries(board.latencies), latencyCells);
  showChanges();
}

/** Fill a table: one row an item, made once and changed in place. */
function rows(body, items, cellsOf) {
  while (body.rows.length > items.length) body.deleteRow(-1);
  items.forEach((item, index) => {
    const cells = cellsOf(item);
    const row = body.rows[index] ?? body.insertRow();
    cells.forEach((cell, at) => {
      const node = row.cells[at] ?? row.appendChild(el(at ? "td" : "th", at ? {} : { scope: "row" }));
      node.className = cell.className ?? "";
      if (cell.state) node.dataset.state = cell.state;
      if (cell.full === undefined) {
        say(node, cell.text);
      } else {
        if (!node.querySelector("meter")) node.replaceChildren(el("span"), el("meter"));
        say(node.firstChild, cell.text);
        Object.assign(node.lastChild, {
          value: cell.full, title: cell.text, ariaHidden: "true", hidden: cell.text === "–",
        });
      }
    });
  });
}

const text = (value, className) => ({ text: String(value), className });
const state = (value, more = "") => ({ text: `${MARKS[value]} ${value}${more}`, state: value });

const answers = (row) => row.state === "ready" || row.state === "draining";

/** What drafts for a worker, and what a request gets of one of its steps. */
function drafts(worker) {
  if (!worker.drafter) return "–";
  if (!answers(worker) || !worker.tokens_per_row) return worker.drafter;
  return `${worker.drafter} ${worker.tokens_per_row.toFixed(1)}`;
}

/** What the KV pool has room for. */
function pool({ pages, page_size, max_len }) {
  const tokens = pages * page_size;
  const told = [`${amount(tokens)} tokens`];
  if (max_len) told.push(`${amount(Math.floor(tokens / max_len))} requests of ${amount(max_len)}`);
  return unbroken(told);
}

function gpu({ used_bytes, num_bytes, watts, max_watts, mhz }) {
  const told = [`${bytes(used_bytes)} of ${bytes(num_bytes)}`];
  if (watts) told.push(`${amount(Math.round(watts))} of ${amount(max_watts)} W`);
  if (mhz) told.push(`${amount(mhz)} MHz`);
  return unbroken(told);
}

/** Parts with commas, so that lines break between parts alone. */
function unbroken(parts) {
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(", ");
}

function workerCells(worker) {
  const isThere = answers(worker);
  const used = worker.pages - worker.free_pages;
  const since = worker.state === "silent" ? ` for ${span(worker.heard_s ?? 0)}` : "";
  return [
    text(worker.ranks > 1 ? `${worker.name} (tp ${worker.ranks})` : worker.name),
    worker.progress
      ? { text: `${MARKS.starting} ${worker.progress}`, state: "starting", full: worker.part }
      : state(worker.state, since),
    text(isThere ? `${worker.running} / ${worker.max_running}` : "–", "num"),
    text(isThere ? worker.waiting : "–", "num"),
    isThere && worker.pages
      ? { text: percent(used, worker.pages), className: "num", full: used / worker.pages }
      : { text: "–", className: "num", full: 0 },
    text(isThere ? pool(worker) : "–", "num wide wraps"),
    text(isThere ? amount(worker.queued_tokens) : "–", "num wide"),
    text(drafts(worker), "num wide drafter"),
    text(isThere && worker.card ? gpu(worker.card) : "–", "num wide wraps gpu"),
    text(worker.node || worker.reason || "–", "wide reason"),
  ];
}

function routerCells(router) {
  const isThere = answers(router);
  return [
    text(router.name),
    state(router.state),
    text(isThere ? router.running : "–", "num"),
    text(isThere ? router.waiting : "–", "num"),
    text(router.node || router.reason || "–", "wide reason"),
  ];
}

function latencyCells([name, of]) {
  return [
    text(LATENCIES[name] ?? name),
    ...[of.p50, of.p90, of.p99].map((value) => text(seconds(value), "num")),
    text(amount(of.count), "num wide"),
  ];
}

function showTiles() {
  const { rates } = board;
  const [history, step] = curves(board);
  const [bad, ends] = [board.errors, board.outcomes].map(Object.entries);
  const [numBad, numEnded] = [bad, ends].map((of) => of.reduce((sum, [, count]) => sum + count, 0));
  const curve = (title, value, series) => tile(title, amount(value), "", series, step);
  curve("Output tokens / s", rates.output_tokens, history.output_tokens);
  curve("Running", board.running, history.running);
  curve("Waiting", board.waiting, history.waiting);
  tile("Ended / s", amount(rates.requests), `prompt tokens ${amount(rates.prompt_tokens)} / s`);
  const prompts = Object.values(board.prefills).reduce((sum, count) => sum + count, 0);
  const moved = board.pull_s ? `${bytes(board.pulled_bytes)} of KV at ${bytes(board.pulled_bytes / board.pull_s)}/s` : "";
  tile("Disaggregated", amount(board.prefills.pulled ?? 0), `of ${amount(prompts)} prompts${moved && `, ${moved}`}`);
  tile(
    "Prefix cache hits",
    percent(board.cached_tokens, board.prompt_tokens),
    `of ${amount(board.prompt_tokens)} prompt tokens`,
  );
  if (board.sessions) {
    const { home = 0, moved: left = 0, new: first = 0, tokens = 0, cached = 0 } = board.turns;
    const found = `${percent(cached, tokens)} of their prompts found there`;
    tile("Sessions", amount(board.sessions), `${percent(home, home + left + first)} of turns went home, ${found}`);
  }
  tile(
    "Errors",
    amount(numBad),
    [`of ${amount(numEnded)} ended`, ...bad.map(([outcome, count]) => `${outcome} ${count}`)].join(", "),
  );
}

const tiles = new Map();
const curves = periods(() => board && showTiles());

function tile(title, value, more, series, step) {
  if (!tiles.has(title)) {
    const parts = [
      el("h3", {}, title),
      el("p", { className: "value" }),
      el("p", { className: "more" }),
    ];
    const chart = series ? spark() : null;
    byId(chart ? "curves" : "tiles").append(el("div", { className: "tile" }, ...parts, ...(chart ? [chart.node] : [])));
    tiles.set(title, { value: parts[1], more: parts[2], chart });
  }
  const made = tiles.get(title);
  say(made.value, value);
  say(made.more, more);
  made.chart?.draw(series, step);
}

let changesShown = "";

function showChanges() {
  const { changes } = board;
  byId("no-changes").hidden = changes.length > 0;
  const list = byId("changes");
  const now = changes.map((each) => each.name + each.incarnation + each.state).join();
  if (now !== changesShown) {
    changesShown = now;
    list.replaceChildren(...changes.map(changeItem));
    const scrolls = list.scrollHeight > list.clientHeight;
    if (scrolls) Object.assign(list, { tabIndex: 0, ariaLabel: "Starts, deaths, drains" });
    else list.removeAttribute("tabindex");
  }
  changes.forEach((each, index) => {
    say(list.children[index].querySelector("time"), `${span(each.ago_s)} ago`);
  });
}

function changeItem(change) {
  const at = new Date(toldAt - 1000 * change.ago_s);
  const what = el("span", { className: "what" }, `${MARKS[change.state] ?? ""} ${change.name} ${change.state}`);
  what.dataset.state = change.state;
  return el(
    "li",
    {},
    el("time", { dateTime: at.toISOString(), title: at.toLocaleString() }),
    what,
    el("span", { className: "why" }, change.text),
  );
}

/** The line on top. Its text changes with the state only, as it is read out. */
function headline() {
  if (failure) return ["bad", `No news from the router: ${failure}.${board ? " All figures are old." : ""}`];
  if (isPaused) return ["warn", "Paused: the figures stand still."];
  return [board.state, board.summary];
}

function showAge() {
  if (!board && !failure) return;
  const [kind, words] = headline();
  const old = board !== null && Date.now() - toldAt > OLD_MS;
  say(byId("headline"), words);
  byId("headline").dataset.state = kind;
  document.body.classList.toggle("stale", old || Boolean(failure));
  say(byId("age"), board ? ageOf(old) : "");
}

function ageOf(old) {
  const since = (at) => span((Date.now() - at) / 1000);
  const lastAt = Math.max(toldAt, resumedAt);
  const waits = failure || Date.now() - lastAt > OLD_MS;
  if (waits && !isPaused) return `no answer for ${since(lastAt)}`;
  return old || isPaused ? `as of ${since(toldAt)} ago` : "up to date";
}

function resume() {
  resumedAt = Date.now();
  ask();
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").ariaPressed = String(isPaused);
  if (!isPaused) resume();
  showAge();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !isPaused) resume();
});
setInterval(showAge, EVERY_MS);
ask();
