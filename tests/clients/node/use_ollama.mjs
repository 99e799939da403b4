// ollama: list, show, chat and generate, whole and streamed; JSON by a schema; tools.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const model = process.env.MODEL;
const client = new Ollama({ host: process.env.SERVER });
assert((await client.list()).models.some((one) => one.model === model));
assert((await client.show({ model })).details);
const messages = [{ role: "user", content: "Name three colours." }];
const options = { temperature: 0, num_predict: 24 };
const whole = await client.chat({ model, messages, options });
let text = "";
let last = null;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, whole.message.content);
assert(last.done);
assert.equal(last.eval_count, whole.eval_count);
const format = {
  type: "object", properties: { colour: { type: "string", maxLength: 20 } }, required: ["colour"], additionalProperties: false,
};
const formed = await client.chat({ model, messages, format, options: { temperature: 0, num_predict: 64 } });
assert.deepEqual(Object.keys(JSON.parse(formed.message.content)), ["colour"]);
const answer = await client.generate({ model, prompt: "The capital of France is", raw: true, options });
assert(answer.response.trim());
await assert.rejects(client.chat({ model: "nobody", messages }), /nobody/);
