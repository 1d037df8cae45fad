// A chat, streamed: what the server sends, event by event.

import { urlOf } from "./common.js";

/** What the server has to say against a request, or the way to it. */
export class Refusal extends Error {
  constructor(message, { status = 0, code = "", requestId = "" } = {}) {
    super(message);
    Object.assign(this, { status, code, requestId });
  }
}

/** The events of an answer to `body`; throws Refusal, or AbortError once `signal` is given. */
export async function* chat(body, key, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(urlOf("v1/chat/completions"), {
      method: "POST",
      headers,
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Refusal("The server does not answer.");
  }
  const requestId = answer.headers.get("x-request-id") ?? "";
  if (!answer.ok) throw await refusalOf(answer, requestId);
  try {
    for await (const data of lines(answer.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) {
        const { message, code } = event.error;
        throw new Refusal(message, { code, requestId }); // the status was 200
      }
      yield event;
    }
  } catch (error) {
    if (signal.aborted || error instanceof Refusal) throw error;
    throw new Refusal("The answer broke off: the connection is lost.", { requestId });
  }
  throw new Refusal("The answer broke off.", { requestId });
}

async function refusalOf(answer, requestId) {
  const body = await answer.json().catch(() => ({}));
  const { message = answer.statusText, code = "" } = body.error ?? {};
  return new Refusal(message, { status: answer.status, code, requestId });
}

/** What follows "data:" in each line of a stream. */
async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data:")) yield part.slice(5).trim();
    }
  }
}
