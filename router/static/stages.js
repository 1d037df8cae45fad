// Where the time of an answer went: a bar, and the same as a table.

import { el, seconds } from "./common.js";

const STAGES = {
  router_queue: "Waited in the router",
  prefill_queue: "Waited for a prefill",
  prefill: "Prefill: computing the prompt",
  transfer: "KV moved to the decode worker",
  decode_queue: "Waited for a row",
  first_step: "First decode step",
  messages: "Messages between router and worker",
  decode: "Decode: all further steps",
};

const AFTER_PREFILL = ["transfer", "decode_queue", "first_step"];

/** Name of each stage and its seconds, in order; what is left until the first token is messages. */
export function timesOf(stages) {
  const times = Object.fromEntries(Object.keys(STAGES).map((name) => [name, stages[`${name}_s`] ?? 0]));
  const after = stages.first_token_after === "prefill" ? [...AFTER_PREFILL, "decode"] : ["decode"];
  const known = Object.entries(times).reduce((sum, [name, s]) => sum + (after.includes(name) ? 0 : s), 0);
  times.messages = Math.max(0, stages.first_token_s - known);
  return times;
}

export function stagesOf(stages) {
  const times = timesOf(stages);
  const total = Object.values(times).reduce((sum, s) => sum + s, 0);
  const bar = el("div", { className: "bar", ariaHidden: "true" });
  const body = el("tbody");
  for (const [name, title] of Object.entries(STAGES)) {
    const part = total ? (100 * times[name]) / total : 0;
    if (times[name] > 0) {
      const piece = el("span", { className: `stage-${name}`, title: `${title}: ${seconds(times[name])}` });
      piece.style.flex = `${part} 0 0`;
      bar.append(piece);
    }
    const swatch = el("span", { className: `swatch stage-${name}`, ariaHidden: "true" });
    body.append(
      el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch, title),
        el("td", { className: "num" }, seconds(times[name])),
        el("td", { className: "num" }, `${part.toFixed(part < 10 ? 1 : 0)} %`),
      ),
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
  const by = stages.prefilled_by ? `prefilled by ${stages.prefilled_by}` : "prompt found in a cache";
  return el(
    "details",
    { className: "stages", open: true },
    el("summary", {}, `Stages: ${seconds(total)}`, bar),
    el("table", {}, caption, head, body),
    el("p", { className: "muted small" }, `${by}, decoded by ${stages.decoded_by}`),
  );
}
