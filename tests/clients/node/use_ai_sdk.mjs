// ai: Vercel's AI SDK with @ai-sdk/openai-compatible: text, streams, objects by a schema, tools.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "engine-core", baseURL: process.env.BASE_URL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider.chatModel(process.env.MODEL);
const brief = { model, maxRetries: 0, temperature: 0, maxOutputTokens: 24 };
const prompt = "Name three colours.";
const whole = await generateText({ ...brief, prompt });
const stream = streamText({ ...brief, prompt });
let text = "";
for await (const delta of stream.textStream) text += delta;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

const city = jsonSchema({
  type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false,
});
const { object } = await generateObject({ ...brief, maxOutputTokens: 64, schema: city, prompt: "Name a city." });
assert.deepEqual(Object.keys(object), ["city"]);

const weather = tool({ description: "The weather of a city.", inputSchema: city, execute: async () => "Sunny." });
const asked = {
  ...brief, maxOutputTokens: 96, tools: { weather }, toolChoice: "required", prompt: "What is the weather in Paris?",
};
const called = await generateText(asked);
assert.equal(called.toolCalls[0].toolName, "weather");
assert.equal(called.toolResults[0].output, "Sunny.");
const streamed = streamText(asked);
await streamed.consumeStream();
assert.deepEqual((await streamed.toolCalls)[0].input, called.toolCalls[0].input);
