// openai: chat, whole and streamed; completions; tools with a schema; parsed JSON; responses; errors by their types.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const greedy = { model, temperature: 0, max_tokens: 16 };

assert((await client.models.list()).data.some((one) => one.id === model));

const whole = await client.chat.completions.create({ ...greedy, messages });
let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...greedy, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const helped = client.chat.completions.stream({ ...greedy, messages });
assert.equal(await helped.finalContent(), whole.choices[0].message.content);

const completion = await client.completions.create({ ...greedy, prompt: "The capital of France is", logprobs: 2 });
assert.equal(completion.choices[0].logprobs.tokens.length, completion.usage.completion_tokens);

const parameters = {
  type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"],
};
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather of a city.", parameters } }];
const asked = { model, temperature: 0, max_tokens: 64, tools, tool_choice: "required", parallel_tool_calls: false };
const question = { role: "user", content: "What is the weather in Paris?" };
const called = await client.chat.completions.create({ ...asked, messages: [question] });
const [call] = called.choices[0].message.tool_calls;
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
const runner = client.chat.completions.stream({ ...asked, messages: [question] });
const [streamed] = (await runner.finalMessage()).tool_calls;
assert.equal(streamed.function.arguments, call.function.arguments);
const history = [question, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "Sunny." }];
assert((await client.chat.completions.create({ ...greedy, tools, messages: history })).choices[0].finish_reason);

const schema = {
  type: "object", properties: { answer: { type: "string", maxLength: 20 } }, required: ["answer"], additionalProperties: false,
};
const response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
const parsed = await client.chat.completions.parse({ ...greedy, max_tokens: 64, messages, response_format });
assert.deepEqual(Object.keys(parsed.choices[0].message.parsed), ["answer"]);

const response = await client.responses.create({ model, input: "Say hello.", temperature: 0, max_output_tokens: 16 });
let deltas = "";
for await (const event of await client.responses.create({
  model, input: "Say hello.", temperature: 0, max_output_tokens: 16, stream: true,
})) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
assert.equal(deltas, response.output_text);

await assert.rejects(client.chat.completions.create({ ...greedy, model: "nope", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...greedy, max_tokens: -3, messages }), OpenAI.BadRequestError);

const controller = new AbortController();
const cut = await client.chat.completions.create(
  { model, messages, max_tokens: 512, ignore_eos: true, stream: true }, { signal: controller.signal },
);
for await (const chunk of cut) {
  if (chunk.choices[0]?.delta?.content) controller.abort();
}
