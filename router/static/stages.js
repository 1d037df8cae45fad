// Where the time of an answer went: lanes, and the same as a table.

import { bytes, el, seconds } from "./common.js";

const STAGES = {
  router_queue: "Waited in the router",
  prefill_queue: "Waited for a prefill",
  prefill: "Prefill: computing the prompt",
  transfer: "Waited for KV from the prefill worker",
  decode_queue: "Waited for a row",
  first_step: "First decode step",
  messages: "Messages between router and worker",
  decode: "Decode: all further steps",
};
const PULL = "KV moved to the decode worker";

/** The stages that took time, as they followed one another: name and seconds. */
function passed(stages) {
  const names = Object.keys(STAGES);
  if (stages.first_token_after === "prefill") {
    names.splice(names.indexOf("messages"), 1);
    names.splice(names.indexOf("transfer"), 0, "messages");
  }
  return names.map((name) => [name, stages[`${name}_s`]]).filter(([, time]) => time > 0);
}

function piece(name, title, time, total) {
  const made = el("span", { className: `stage-${name}`, title: `${title}: ${seconds(time)}` });
  made.style.flex = `${(100 * time) / total} 0 0`;
  return made;
}

/** Where the pulls were beside the stages: the last one ended where the wait for them did. */
function pullLane(stages, times, total) {
  const upTo = stages.transfer_s > 0 ? "transfer" : "prefill";
  const at = times.findIndex(([name]) => name === upTo) + 1;
  const end = times.slice(0, at).reduce((sum, [, time]) => sum + time, 0);
  const time = Math.min(stages.pull_span_s, end);
  const lane = el("div", { className: "lane" });
  for (const gap of [end - time, total - end]) {
    const space = el("span");
    space.style.flex = `${(100 * gap) / total} 0 0`;
    lane.append(space);
  }
  lane.firstChild.after(piece("pull", PULL, time, total));
  return lane;
}

function row(name, title, time, share) {
  const swatch = el("span", { className: `swatch stage-${name}`, ariaHidden: "true" });
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, swatch, title),
    el("td", { className: "num" }, seconds(time)),
    el("td", { className: "num" }, share),
  );
}

/** Tokens a second of the decode steps alone, as the server measured them; null: there were none. */
export function decodeRate(stages, numTokens) {
  const num = numTokens - (stages.first_token_after === "prefill" ? 2 : 1);
  return num > 0 && stages.decode_s > 0 ? num / stages.decode_s : null;
}

export function stagesOf(stages) {
  const times = passed(stages);
  const total = times.reduce((sum, [, time]) => sum + time, 0) || 1;
  const bar = el("div", { className: "bar", ariaHidden: "true" });
  bar.append(el("div", { className: "lane" }, ...times.map(([name, time]) => piece(name, STAGES[name], time, total))));
  const body = el("tbody");
  for (const [name, time] of times) {
    const part = (100 * time) / total;
    body.append(row(name, STAGES[name], time, `${part.toFixed(part < 10 ? 1 : 0)} %`));
  }
  const told = [
    stages.prefilled_by ? `prefilled by ${stages.prefilled_by}` : "prompt found in a cache",
    `decoded by ${stages.decoded_by}`,
  ];
  if (stages.pull_s > 0) {
    bar.append(pullLane(stages, times, total));
    body.append(row("pull", PULL, stages.pull_s, "beside"));
    const ahead = Math.max(0, stages.pull_span_s - stages.transfer_s);
    told.push(
      `${bytes(stages.pulled_bytes)} of KV at ${bytes(stages.pulled_bytes / stages.pull_s)}/s, ` +
        `from ${seconds(ahead)} before the prompt was ready`,
    );
  }
  const head = el(
    "thead",
    {},
    el(
      "tr",
      {},
      el("th", { scope: "col" }, "Stage"),
      el("th", { scope: "col", className: "num" }, "Time"),
      el("th", { scope: "col", className: "num" }, "Share"),
    ),
  );
  const caption = el("caption", { className: "unseen" }, "Stages of this answer");
  return el(
    "details",
    { className: "stages", open: true },
    el("summary", {}, `Stages: ${seconds(total)}`, bar),
    el("table", {}, caption, head, body),
    el("p", { className: "muted small" }, told.join(", ")),
  );
}
