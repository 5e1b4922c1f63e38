// Agents of Vercel's SDK, by their names.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const apiKey = process.env.OPENAI_API_KEY;
const baseURL = process.env.OPENAI_BASE_URL;
const openai = createOpenAI({ apiKey, baseURL });
const search = tool({
  description: "Searches.",
  inputSchema: z.object({ query: z.string() }),
  execute: async () => "Mara Quill",
});
const tools = { tools: { search }, stopWhen: stepCountIs(3), system: "Be brief." };
const prompt = JSON.parse(readFileSync(0, "utf8")).question.text;
const agents = {
  responses: async () => (await generateText({ model: openai("gpt-5"), prompt, ...tools })).text,
  stream: async () => await streamText({ model: openai("gpt-5"), prompt, ...tools }).text,
  chat: async () => (await generateText({ model: openai.chat("policy"), prompt, ...tools })).text,
  anthropic: async () =>
    (await generateText({ model: createAnthropic({ apiKey, baseURL })("claude-x"), prompt, ...tools })).text,
  typed: async () =>
    (await generateObject({ model: openai("gpt-5"), prompt, schema: z.object({ name: z.string() }) })).object.name,
};
console.log(JSON.stringify({ answer: await agents[process.argv[2]]() }));
