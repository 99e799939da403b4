// @langchain/openai: invoke, stream, tools, structured output.
import assert from "node:assert/strict";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const model = new ChatOpenAI({
  model: process.env.MODEL, temperature: 0, maxTokens: 48, maxRetries: 0,
  configuration: { baseURL: process.env.BASE_URL }, apiKey: "none",
});
const whole = await model.invoke("Name three colours.");
let text = "";
for await (const chunk of await model.stream("Name three colours.")) text += chunk.content;
assert.equal(text, whole.content);
assert(whole.usage_metadata.output_tokens > 0);

const city = z.object({ city: z.string().max(20) });
const formed = await model.withStructuredOutput(city, { method: "jsonSchema" }).invoke("Name a city.");
assert.deepEqual(Object.keys(formed), ["city"]);
const weather = { type: "function", function: { name: "weather", description: "The weather.", parameters: z.toJSONSchema(city) } };
const called = await model.bindTools([weather], { tool_choice: "weather" }).invoke("What is the weather in Paris?");
assert.equal(called.tool_calls[0].name, "weather");
assert.deepEqual(Object.keys(called.tool_calls[0].args), ["city"]);
