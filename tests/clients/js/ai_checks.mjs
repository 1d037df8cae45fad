// The AI SDK against a running cluster, by responses (its default with OpenAI's provider), by chats
// and by the provider for compatible servers: `node ai_checks.mjs URL`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?";
const ANSWER = "#### 70";
const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ baseURL, name: "kvlane", supportsStructuredOutputs: true });
const MODELS = { responses: openai("tiny"), chat: openai.chat("tiny"), compatible: compatible("tiny") };
const Solution = z.object({
  reasoning: z.string(),
  first: z.object({ unit: z.enum(["apples", "bags"]), count: z.number().int() }),
  total: z.number().int(),
});

async function text(model) {
  const made = await generateText({ model, prompt: QUESTION, maxRetries: 0 });
  assert.ok(made.text.endsWith(ANSWER), made.text);
  assert.equal(made.finishReason, "stop");
  assert.ok(made.usage.outputTokens > 0);
}

async function stream(model) {
  const pieces = [];
  const made = streamText({ model, prompt: QUESTION, maxRetries: 0 });
  for await (const piece of made.textStream) pieces.push(piece);
  assert.ok(pieces.length > 5);
  assert.ok(pieces.join("").endsWith(ANSWER));
}

async function tools(model) {
  const calls = [];
  const add = tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => { calls.push([a, b]); return a + b; },
  });
  const made = await generateText({
    model, prompt: QUESTION, tools: { add }, maxRetries: 0, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.ok(calls.length > 0);
  assert.ok(made.steps[0].toolResults.length > 0);
  assert.ok(made.text);
}

async function structured_output(model) {
  const output = Output.object({ schema: Solution });
  const made = await generateText({ model, prompt: QUESTION, output, maxRetries: 0 });
  Solution.parse(made.output ?? made.experimental_output);
}

const manifest = new URL("node_modules/ai/package.json", import.meta.url);
console.log("ai.js", JSON.parse(readFileSync(manifest, "utf8")).version);
for (const [name, model] of Object.entries(MODELS)) {
  for (const check of [text, stream, tools, structured_output]) {
    await check(model);
    console.log("passed", `${check.name}_by_${name}`);
  }
}
