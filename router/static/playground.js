// A chat with the model. What it says is inserted as text, never as markup.

import { amount, byId, el, say, seconds, urlOf } from "./common.js";
import { decodeRate, stagesOf } from "./stages.js";
import { Refusal, chat } from "./stream.js";

const KEY = "kvlane-key";
const NARROW = matchMedia("(max-width: 50rem)");

let history = [];
let running = null; // what stops the answer that is being written

function settings() {
  const body = { stream: true, stream_options: { include_usage: true }, return_stages: true };
  const system = byId("system").value.trim();
  const temperature = byId("temperature").valueAsNumber;
  const maxTokens = byId("max-tokens").valueAsNumber;
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  if (!Number.isNaN(maxTokens)) body.max_tokens = maxTokens;
  return body;
}

/** One answer in the log, as it grows. */
function answerIn(log) {
  const said = el("p", { className: "said" });
  const item = el("li", { className: "assistant card" }, el("p", { className: "who" }, "Model"), said);
  let reasoning = null;
  log.append(item);
  return {
    said,
    add(delta) {
      if (delta.reasoning_content) {
        if (!reasoning) {
          reasoning = el("p");
          said.before(
            el("details", { className: "reasoning", open: true }, el("summary", {}, "Reasoning"), reasoning),
          );
        }
        reasoning.append(delta.reasoning_content);
      }
      if (delta.content) said.append(delta.content);
    },
    fact: (text) => item.append(el("p", { className: "facts muted small" }, text)),
    append: (...nodes) => item.append(...nodes),
    over: () => item.classList.add("over"),
  };
}

function errorBox(error) {
  const about = [
    error.status ? `HTTP ${error.status}` : "",
    error.code ? `code ${error.code}` : "",
    error.requestId ? `request id ${error.requestId}` : "",
  ].filter(Boolean);
  const box = el("div", { className: "error" }, el("p", {}, el("strong", {}, "Error: "), error.message));
  box.setAttribute("role", "alert");
  if (about.length) box.append(el("p", { className: "small mono" }, about.join(" · ")));
  return box;
}

function factsOf({ usage, reason, stages, firstAt, beganAt }) {
  const facts = [reason ? `ended by ${reason}` : "stopped by you"];
  if (firstAt) facts.push(`first token here after ${seconds((firstAt - beganAt) / 1000)}`);
  if (usage) {
    const { completion_tokens: made, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
    facts.push(`${amount(made)} tokens`);
    const rate = stages && decodeRate(stages, made);
    if (rate) facts.push(`${amount(rate)} tokens/s`);
    const cached = details?.cached_tokens ? `, ${amount(details.cached_tokens)} of them cached` : "";
    facts.push(`${amount(prompt)} tokens of prompt${cached}`);
  }
  return facts.join(" · ");
}

async function write(answer, controller) {
  const seen = { usage: null, reason: "", stages: null, firstAt: 0, beganAt: performance.now() };
  let failure = null;
  try {
    for await (const event of chat(settings(), byId("key").value, controller.signal)) {
      seen.usage = event.usage ?? seen.usage;
      const [choice] = event.choices;
      if (!choice) continue;
      answer.add(choice.delta);
      if (choice.delta.content || choice.delta.reasoning_content) seen.firstAt ||= performance.now();
      seen.reason = choice.finish_reason ?? seen.reason;
      seen.stages = choice.stages ?? seen.stages;
      follow();
    }
  } catch (error) {
    if (!controller.signal.aborted) {
      failure = error instanceof Refusal ? error : new Refusal(`This page failed: ${error.message}`);
    }
  }
  answer.over();
  if (failure) answer.append(errorBox(failure));
  else answer.fact(factsOf(seen));
  if (seen.stages) {
    for (const older of document.querySelectorAll(".stages[open]")) older.open = false;
    answer.append(stagesOf(seen.stages));
  }
  return failure;
}

/** Keep the end in view, unless the reader has scrolled away from it. */
function follow() {
  const page = document.documentElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 200) page.scrollTop = page.scrollHeight;
}

async function send() {
  const message = byId("message").value.trim();
  if (!message || running) return;
  byId("message").value = "";
  byId("empty").hidden = true;
  const log = byId("log");
  log.append(
    el("li", { className: "user" }, el("p", { className: "who" }, "You"), el("p", { className: "said" }, message)),
  );
  history.push({ role: "user", content: message });
  const answer = answerIn(log);
  const controller = (running = new AbortController());
  busy(true);
  say(byId("status"), "Answering…");
  follow();
  const failure = await write(answer, controller);
  if (running !== controller) return; // a new chat was begun meanwhile
  running = null;
  busy(false);
  say(byId("status"), failure ? "Failed." : controller.signal.aborted ? "Stopped." : "Answered.");
  if (failure) {
    history.pop();
    byId("message").value ||= message; // it may be asked again
    if (failure.status === 401) askForKey();
  } else {
    history.push({ role: "assistant", content: answer.said.textContent });
  }
  follow();
}

function busy(is) {
  byId("stop").disabled = !is;
  byId("send").disabled = is;
  if (!is && document.activeElement === document.body) byId("message").focus();
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  running = null;
  busy(false);
  history = [];
  byId("log").replaceChildren();
  byId("empty").hidden = false;
  say(byId("status"), "");
  byId("message").focus();
}

function askForKey() {
  byId("settings").open = true;
  byId("key").focus();
}

async function nameModel() {
  const answer = await fetch(urlOf("dashboard/data")).catch(() => null);
  if (!answer?.ok) return;
  const { model } = await answer.json();
  say(byId("model"), model);
  document.title = `${model} – kvlane playground`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("clear").addEventListener("click", clear);
byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("input", () => sessionStorage.setItem(KEY, byId("key").value));
byId("settings").open = !NARROW.matches;
byId("message").focus();
nameModel();
