// Anthropic's JavaScript client against a running cluster: `node anthropic_checks.mjs URL`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?";
const ANSWER = "#### 70";
const ASKED = { model: "tiny", max_tokens: 200, messages: [{ role: "user", content: QUESTION }] };
const numbers = { a: { type: "integer" }, b: { type: "integer" } };
const TOOL = {
  name: "add", description: "Add two numbers.",
  input_schema: { type: "object", properties: numbers, required: ["a", "b"] },
};
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });

async function messages() {
  const made = await client.messages.create(ASKED);
  assert.ok(made.content.at(-1).text.endsWith(ANSWER));
  assert.equal(made.stop_reason, "end_turn");
  const { input_tokens } = await client.messages.countTokens({ model: "tiny", messages: ASKED.messages });
  const { input_tokens: fresh, cache_read_input_tokens: cached } = made.usage;
  assert.equal(input_tokens, fresh + cached);
}

async function stream() {
  let text = "";
  const runner = client.messages.stream(ASKED).on("text", (delta) => { text += delta; });
  assert.equal((await runner.finalMessage()).content.at(-1).text, text);
  assert.ok(text.endsWith(ANSWER));
}

async function tools() {
  const asked = { ...ASKED, tools: [TOOL] };
  const made = await client.messages.create({ ...asked, tool_choice: { type: "tool", name: "add" } });
  const call = made.content.find((block) => block.type === "tool_use");
  assert.deepEqual(Object.keys(call.input).sort(), ["a", "b"]);
  const result = { type: "tool_result", tool_use_id: call.id, content: String(call.input.a + call.input.b) };
  const turns = [...ASKED.messages, { role: "assistant", content: made.content }, { role: "user", content: [result] }];
  assert.ok((await client.messages.create({ ...asked, messages: turns })).content.length > 0);
}

async function mistakes() {
  await assert.rejects(
    client.messages.create({ ...ASKED, model: "nobody" }),
    (error) => error instanceof Anthropic.NotFoundError,
  );
}

const manifest = new URL("node_modules/@anthropic-ai/sdk/package.json", import.meta.url);
console.log("anthropic.js", JSON.parse(readFileSync(manifest, "utf8")).version);
for (const check of [messages, stream, tools, mistakes]) {
  await check();
  console.log("passed", check.name);
}
