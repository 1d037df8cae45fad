// OpenAI's JavaScript client against a running cluster: `node openai_checks.mjs URL`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?";
const ANSWER = "#### 70";
const ASKED = { model: "tiny", messages: [{ role: "user", content: QUESTION }] };
const Item = z.object({ unit: z.enum(["apples", "bags"]), count: z.number().int() });
const Solution = z.object({
  reasoning: z.string().describe("how it was found"),
  first: Item,
  others: z.array(Item),
  total: z.number().int(),
  note: z.string().nullable(),
});
const Add = z.object({ a: z.number().int(), b: z.number().int() });
const ADD = zodFunction({
  name: "add", description: "Add two numbers.", parameters: Add, function: ({ a, b }) => a + b,
});
const NAMED = { type: "function", function: { name: "add" } };

async function chat(client) {
  const made = await client.chat.completions.create(ASKED);
  assert.ok(made.choices[0].message.content.endsWith(ANSWER));
  assert.equal(made.choices[0].finish_reason, "stop");
  assert.ok(made.usage.total_tokens > 0);
  assert.ok(made._request_id);
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["tiny"]);
}

async function stream(client) {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...ASKED, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.ok(text.endsWith(ANSWER));
  let found = "";
  const runner = client.chat.completions.stream({ ...ASKED, stream_options: { include_usage: true } });
  runner.on("content", (delta) => { found += delta; });
  assert.equal(await runner.finalContent(), text);
  assert.equal(found, text);
  assert.ok((await runner.totalUsage()).completion_tokens > 0);
  const left = await client.chat.completions.create({ ...ASKED, stream: true });
  for await (const _ of left) break; // leaving closes the connection
  assert.ok(left.controller.signal.aborted);
}

async function tools(client) {
  const asked = { ...ASKED, tools: [ADD], tool_choice: NAMED };
  const made = await client.chat.completions.parse(asked);
  const [call, ...more] = made.choices[0].message.tool_calls;
  assert.equal(more.length, 0);
  Add.parse(call.function.parsed_arguments);
  const streamed = await client.chat.completions.stream(asked).finalMessage();
  assert.deepEqual(streamed.tool_calls[0].function, call.function);
  // runTools calls the function, sends its result back, and ends after one call where one is named.
  const results = [];
  const runner = client.chat.completions.runTools(asked);
  runner.on("functionToolCallResult", (result) => results.push(result));
  await runner.done();
  const { a, b } = JSON.parse(runner.messages.at(-2).tool_calls[0].function.arguments);
  assert.deepEqual(results, [JSON.stringify(a + b)]);
}

async function whether_it_calls_by_itself_is_the_models_text(client) {
  const runner = client.chat.completions.runTools({ ...ASKED, tools: [ADD] }, { maxChatCompletions: 3 });
  await runner.done();
  assert.equal(runner.messages[0].content, QUESTION);
}

async function structured_output(client) {
  const asked = { ...ASKED, response_format: zodResponseFormat(Solution, "solution") };
  const made = await client.chat.completions.parse(asked);
  assert.equal(made.choices[0].finish_reason, "stop");
  Solution.parse(made.choices[0].message.parsed);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, made.choices[0].message.parsed);
}

async function mistakes(client) {
  await assert.rejects(
    client.chat.completions.create({ ...ASKED, model: "nobody" }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  await assert.rejects(
    client.chat.completions.create({ ...ASKED, temperature: "hot" }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
}

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const manifest = new URL("node_modules/openai/package.json", import.meta.url);
console.log("openai.js", JSON.parse(readFileSync(manifest, "utf8")).version);
const own = whether_it_calls_by_itself_is_the_models_text;
for (const check of [chat, stream, tools, own, structured_output, mistakes]) {
  await check(client);
  console.log("passed", check.name);
}
