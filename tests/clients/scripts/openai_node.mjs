// The `openai` package of npm: answers, streams, tools, structure, errors, embeddings.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "snapserve-demo";
const messages = [{ role: "user", content: "What is the pet of Celia?" }];

const whole = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0 });
assert.equal(whole.object, "chat.completion");
assert.ok(whole.choices[0].message.content);

const stream = client.chat.completions.stream({ model, messages, max_tokens: 12, temperature: 0, stream_options: { include_usage: true } });
let text = "";
stream.on("content", (delta) => (text += delta));
const final = await stream.finalChatCompletion();
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(final.usage.completion_tokens, whole.usage.completion_tokens);

const left = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 4000 });
for await (const chunk of left) {
  assert.equal(chunk.object, "chat.completion.chunk");
  break; // and the server must not mind
}

const schema = { type: "object", properties: { level: { enum: ["low", "high"] } }, required: ["level"], additionalProperties: false };
const parsed = await client.chat.completions.parse({
  model,
  messages,
  temperature: 0,
  max_tokens: 300,
  response_format: { type: "json_schema", json_schema: { name: "level", schema, strict: true } },
});
assert.ok(["low", "high"].includes(parsed.choices[0].message.parsed.level));

const called = await client.chat.completions.create({
  model,
  messages,
  temperature: 0,
  max_tokens: 300,
  tools: [{ type: "function", function: { name: "set_level", parameters: schema, strict: true } }],
  tool_choice: "required",
});
assert.equal(called.choices[0].message.tool_calls[0].function.name, "set_level");
assert.ok(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).level);

const models = [];
for await (const one of await client.models.list()) models.push(one.id);
assert.ok(models.includes(model));

const vectors = await client.embeddings.create({ model, input: ["one", "two"] });
assert.equal(vectors.data.length, 2);
assert.ok(Math.abs(Math.hypot(...vectors.data[0].embedding) - 1) < 1e-5);

const response = await client.responses.create({ model, input: "What is the pet of Celia?", max_output_tokens: 12, temperature: 0 });
assert.ok(response.output_text);
const events = client.responses.stream({ model, input: "What is the pet of Celia?", max_output_tokens: 12, temperature: 0 });
let written = "";
events.on("response.output_text.delta", (event) => (written += event.delta));
assert.equal((await events.finalResponse()).output_text, response.output_text);
assert.equal(written, response.output_text);
const next = await client.responses.create({ model, input: "And of Anna?", previous_response_id: response.id, max_output_tokens: 12 });
assert.ok(next.usage.input_tokens > response.usage.input_tokens);

const line = { custom_id: "one", method: "POST", url: "/v1/chat/completions", body: { model, messages, max_tokens: 4 } };
const file = await client.files.create({ file: await toFile(Buffer.from(JSON.stringify(line) + "\n"), "in.jsonl"), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 200));
  batch = await client.batches.retrieve(batch.id);
}
assert.equal(batch.status, "completed");
const answered = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
assert.equal(answered.custom_id, "one");
assert.ok(answered.response.body.choices[0].message.content !== undefined);

await assert.rejects(client.chat.completions.create({ model: "another", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), OpenAI.BadRequestError);
console.log("ok");
