// @anthropic-ai/sdk: messages, whole and streamed; tools; the number of tokens; errors by their types.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const model = process.env.MODEL;
const client = new Anthropic({ baseURL: process.env.SERVER, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const brief = { model, system: "Be brief.", messages };
const greedy = { ...brief, max_tokens: 24, temperature: 0 };
const whole = await client.messages.create(greedy);
const stream = client.messages.stream(greedy);
let text = "";
stream.on("text", (delta) => { text += delta; });
const final = await stream.finalMessage();
assert.equal(text, whole.content[0].text);
assert.equal(final.stop_reason, whole.stop_reason);
assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
const count = await client.messages.countTokens(brief);
const { input_tokens, cache_creation_input_tokens, cache_read_input_tokens } = whole.usage;
assert.equal(count.input_tokens, input_tokens + cache_creation_input_tokens + cache_read_input_tokens);

const input_schema = {
  type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"],
};
const tools = [{ name: "get_weather", description: "The weather of a city.", input_schema }];
const tool_choice = { type: "any", disable_parallel_tool_use: true };
const asked = { model, max_tokens: 96, temperature: 0, tools, tool_choice };
const question = { role: "user", content: "What is the weather in Paris?" };
const called = await client.messages.create({ ...asked, messages: [question] });
assert.equal(called.stop_reason, "tool_use");
const [block] = called.content;
assert.deepEqual(Object.keys(block.input), ["city"]);
const streamed = await client.messages.stream({ ...asked, messages: [question] }).finalMessage();
assert.deepEqual(streamed.content[0].input, block.input);
const result = { role: "user", content: [{ type: "tool_result", tool_use_id: block.id, content: "Sunny." }] };
const history = [question, { role: "assistant", content: called.content }, result];
assert((await client.messages.create({ model, max_tokens: 8, tools, messages: history })).content.length);

await assert.rejects(client.messages.create({ ...greedy, model: "nobody" }), Anthropic.NotFoundError);
